"""Buckets on their way from one sender to all receivers, a few at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from unified.errors import RpcError, RpcTimeoutError
from unified.protocol.records import WorkerIncarnation
from unified.weights.lives import GONE, LATE, OVERTAKEN, Failure, LifeCalls, failure_of, method
from unified.weights.staging import Staged, Stager
from unified.weights.transfer_plan import Manifest

IN_FLIGHT = 3
"""Buckets that were sent and not answered yet."""


class Conveyor:
    """Sends the buckets of one rank in one attempt.

    Args:
        name: of the receivers.
        heads: to whom it sends; they pass on to their mates.
        deadline: on the monotonic clock.

    Attributes:
        failures: by worker; who is in there gets no more.
    """

    def __init__(
        self,
        calls: LifeCalls,
        stager: Stager,
        name: str,
        manifest: Manifest,
        heads: Sequence[WorkerIncarnation],
        deadline: float,
    ) -> None:
        self.failures: dict[str, Failure] = {}
        self._calls = calls
        self._stager = stager
        self._method = method(name, "bucket")
        self._manifest = manifest
        self._heads = heads
        self._deadline = deadline
        self._overtaken: set[str] = set()
        self._under_way: deque[tuple[Staged, dict[WorkerIncarnation, Future[Any]]]] = deque()

    def put(self, index: int, staged: Staged) -> None:
        """Send a bucket as soon as there is room."""
        while len(self._under_way) >= IN_FLIGHT:
            self._take_oldest()
        staged.wait()
        done = self.failures.keys() | self._overtaken
        heads = [head for head in self._heads if head.worker not in done]
        futures: list[Future[Any]] = []
        try:
            futures = self._calls.call_many(
                heads, self._method, [self._manifest.session, index, staged.tensors], timeout=self._left_s()
            )
        except RpcTimeoutError as error:
            for head in heads:
                self._fail(head, Failure(LATE, str(error)))
        self._under_way.append((staged, dict(zip(heads, futures, strict=False))))

    def drain(self) -> None:
        """Wait until every bucket was answered, or cannot be."""
        while self._under_way:
            self._take_oldest()

    def _take_oldest(self) -> None:
        staged, futures = self._under_way.popleft()
        is_over = True
        for head, future in futures.items():
            if head.worker in self.failures:
                future.cancel()
                is_over = False
                continue
            try:
                self._learn(head, future.result())  # the call has a deadline of its own
            except RpcError as error:
                future.cancel()
                is_over = False
                self._fail(head, failure_of(error))
        if is_over:
            self._stager.put_back(staged)  # else a message that reads it may still be waiting: the memory goes with it

    def _learn(self, head: WorkerIncarnation, failures: dict[str, Failure]) -> None:
        """What a head answered, of itself and of its mates."""
        self.failures |= {worker: failure for worker, failure in failures.items() if failure.kind != OVERTAKEN}
        own = failures.get(head.worker)
        if own is None:
            return
        if own.kind == OVERTAKEN:
            self._overtaken.add(head.worker)
            own = Failure(GONE, "it has a newer version")
        self._lose_mates(head, own)

    def _fail(self, head: WorkerIncarnation, failure: Failure) -> None:
        self.failures[head.worker] = failure
        self._lose_mates(head, failure)

    def _lose_mates(self, head: WorkerIncarnation, failure: Failure) -> None:
        for mate in self._manifest.mates.get(head.worker, ()):
            text = f"worker {head.worker}, which passes buckets on to it, did not: {failure.text}"
            self.failures.setdefault(mate.worker, Failure(failure.kind, text))

    def _left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)
