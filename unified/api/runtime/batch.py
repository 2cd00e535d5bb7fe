"""Arguments of `call_batch`, cut into shares, and the results of all workers as one sequence."""

from __future__ import annotations

import itertools
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, overload

from unified.errors import UsageError

T = TypeVar("T")


def is_cut(value: object) -> bool:
    """Return True if each actor gets a share of the value: a sequence that is not text or bytes, an array, a tensor."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        return False
    if isinstance(value, Sequence):
        return True
    for module, name in (("numpy", "ndarray"), ("torch", "Tensor")):
        loaded = sys.modules.get(module)
        if loaded is not None and isinstance(value, getattr(loaded, name)):
            return bool(value.ndim)
    return False


def share(value: Any, start: int, end: int) -> Any:
    """The part of an argument for the actor that gets inputs `start` to `end`."""
    if not is_cut(value):
        return value
    try:
        return value[start:end]
    except TypeError:  # a sequence that cannot be sliced, such as a deque
        return [value[i] for i in range(start, end)]


def size_of_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """Return the size given to `call_batch`, by position or by name, and the arguments after it.

    If a number is at the position of the size, a keyword `size` is an argument of the method.
    """
    if "size" in kwargs and not (args and type(args[0]) is int):
        return kwargs.pop("size"), args
    if not args:
        raise UsageError("call_batch(method, size, …) needs size, the number of inputs of the batch.")
    return args[0], args[1:]


def check_lengths(size: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise UsageError (a ValueError) unless every argument that is cut has `size` entries."""
    if type(size) is not int or size < 0:
        raise UsageError(f"the size of a batch is a number from 0 on, not {size!r}.")
    for where, value in [*((f"argument {i}", arg) for i, arg in enumerate(args)), *kwargs.items()]:
        if is_cut(value) and len(value) != size:
            raise UsageError(
                f"the batch has {size} inputs, but {where} has {len(value)} entries: give one for each input."
            )


class FutureSequence(Sequence[T]):
    """Sequence over several futures, each of a run of results. Reading blocks only for the runs that are read.

    Args:
        futures: each becomes a sequence of results.
        lens: number of results of each future.
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
        """Return all results, after a wait of at most `timeout` seconds.

        Raises:
            RpcError: the error of the first failed call, in order.
            RpcTimeoutError: not all results came in time.
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
        """Mark the errors of all parts as read, so that none is logged: the caller has read one of them."""
        for future in self._futures:
            future.add_done_callback(lambda ended: ended.exception())
