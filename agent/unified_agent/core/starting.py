"""Starts of workers on one node: a bounded number at once, so that a large job starves neither its agent nor others."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from unified.protocol.records import JobWorkerIncarnation

STARTS_PER_CPU = 4
LEAST_STARTS = 16
"""Processes that may start at once on the smallest node: a start also waits for memory and files."""


def max_starts(num_cpus: float) -> float:
    """Return the number of processes that may start at once on a node with `num_cpus` CPUs."""
    return math.inf if math.isinf(num_cpus) else max(LEAST_STARTS, math.ceil(STARTS_PER_CPU * num_cpus))


class StartQueue:
    """Incarnations that wait for their start, in order, and at most `limit` incarnations that are starting.

    An incarnation is starting until it says hello or ends. An incarnation that is no longer desired is forgotten before
    it starts, so that the end of a job overtakes its beginning.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._waiting: deque[JobWorkerIncarnation] = deque()
        self._starting: set[JobWorkerIncarnation] = set()

    def clear(self) -> None:
        self._waiting.clear()

    def add(self, incarnation: JobWorkerIncarnation) -> None:
        self._waiting.append(incarnation)

    def take(self, settled: JobWorkerIncarnation | None = None) -> Iterator[JobWorkerIncarnation]:
        """Settle `settled`, then yield incarnations to start, up to the limit; the caller calls `began` for each."""
        if settled is not None:
            self.settled(settled)
        while self._waiting and len(self._starting) < self._limit:
            yield self._waiting.popleft()

    def began(self, incarnation: JobWorkerIncarnation) -> None:
        self._starting.add(incarnation)

    def settled(self, incarnation: JobWorkerIncarnation) -> None:
        """Note that an incarnation has said hello, or has ended."""
        self._starting.discard(incarnation)
