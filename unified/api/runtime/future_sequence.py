"""The results of a batch that was spread over workers, as one sequence."""

from __future__ import annotations

import itertools
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, overload

from unified.errors import UsageError

T = TypeVar("T")


class FutureSequence(Sequence[T]):
    """Several futures, each of a run of results, read as one sequence. Reading blocks only for the runs that are read.

    Args:
        futures: each becomes a sequence of results.
        lens: how many results each becomes.
    """

    def __init__(self, futures: Sequence[Future[Any]], lens: Sequence[int]) -> None:
        if len(futures) != len(lens):
            raise UsageError(f"FutureSequence got {len(futures)} futures and {len(lens)} lengths.")
        self._futures = list(futures)
        self._lens = list(lens)
        self._ends = list(itertools.accumulate(lens))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"index {index} is outside a FutureSequence of {len(self)} results.")
        which = bisect_right(self._ends, position)
        return self._run(which)[position - (self._ends[which] - self._lens[which])]

    def __iter__(self) -> Iterator[T]:
        for which in range(len(self._futures)):
            yield from self._run(which)

    def wait(self, timeout: float | None = None) -> list[T]:
        """All results, waiting for at most `timeout` seconds.

        Raises:
            RpcError: what the first failed call, in order, ended in.
            RpcTimeoutError: not all are there yet.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        results: list[T] = []
        for which in range(len(self._futures)):
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            results.extend(self._run(which, left))
        return results

    def __repr__(self) -> str:
        return f"FutureSequence(lens={self._lens})"

    def _run(self, which: int, timeout: float | None = None) -> Sequence[T]:
        try:
            run: Sequence[T] = self._futures[which].result(timeout)
        except Exception:
            if self._futures[which].done():
                self._one_speaks_for_all()
            raise
        if len(run) != self._lens[which]:
            raise UsageError(
                f"part {which} of a batch of {len(self)} returned {len(run)} results for {self._lens[which]} inputs: "
                "a handler for call_batch returns one result for each input."
            )
        return run

    def _one_speaks_for_all(self) -> None:
        """A part of the batch has failed, and that was read: of the others' errors nobody need be told."""
        for future in self._futures:
            future.add_done_callback(lambda ended: ended.exception())
