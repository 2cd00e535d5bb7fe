"""Reads shards ahead of their consumer, on a thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from unified.data.position import Reading
from unified.errors import UsageError
from unified.threads import start_thread

SAMPLES_AT_ONCE = 64
"""The number of samples that are handed from thread to thread together."""


@dataclass(eq=False)
class _PrefetchedShard:
    reading: Reading
    chunks: deque[list[Any]] = field(default_factory=deque)
    is_begun: bool = False
    is_dropped: bool = False
    is_whole: bool = False
    """True if nothing more comes: the shard was read to its end, or to an error."""
    error: BaseException | None = None


class ShardPrefetcher:
    """A thread that reads wanted shards one after another, each as a whole into memory.

    It starts with the first wanted shard and ends with `close`.
    """

    def __init__(self, read: Callable[[Reading], Generator[Any, None, None]]) -> None:
        self._read = read
        self._changed = threading.Condition()
        self._ahead: dict[int, _PrefetchedShard] = {}
        """Wanted shards, in order."""
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def want(self, readings: Sequence[Reading]) -> None:
        """Want only these shards, in this order. Samples of others are dropped."""
        with self._changed:
            wanted = {}
            for each in readings:
                shard_id = each.assignment.shard_id
                wanted[shard_id] = self._ahead.pop(shard_id) if shard_id in self._ahead else _PrefetchedShard(each)
            for dropped in self._ahead.values():
                dropped.is_dropped = True
            self._ahead = wanted
            self._changed.notify_all()
            if self._thread is None and readings:
                self._thread = start_thread("data-prefetch", self._run)

    def take(self, shard_id: int) -> Iterator[Any]:
        """Yield the samples of a wanted shard as they come; then raise the error of reading it, if there was one."""
        ahead = self._ahead[shard_id]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: ahead.chunks or ahead.is_whole or self._is_closed)
                if not ahead.chunks:
                    if ahead.error is not None:
                        raise ahead.error
                    if not ahead.is_whole:
                        raise UsageError("reading ahead was ended before this shard was read to its end.")
                    return
                chunk = ahead.chunks.popleft()
            yield from chunk

    def close(self) -> bool:
        """End the thread, after the samples that it is reading; return whether it has ended. Safe to call twice."""
        with self._changed:
            self._is_closed = True
            self._ahead.clear()
            self._changed.notify_all()
        if self._thread is threading.current_thread():  # the garbage collector may run this on any thread
            return False
        if self._thread is not None:
            self._thread.join()
        return True

    def _run(self) -> None:
        while (ahead := self._next()) is not None:
            chunk: list[Any] = []
            is_whole = False
            try:
                with closing(self._read(ahead.reading)) as samples:
                    for sample in samples:
                        chunk.append(sample)
                        if len(chunk) == SAMPLES_AT_ONCE:
                            self._hand_over(ahead, chunk)
                            chunk = []
                        if ahead.is_dropped or self._is_closed:
                            break
                    else:
                        is_whole = True
            except BaseException as error:  # `take` raises it
                ahead.error, is_whole = error, True
            finally:
                self._hand_over(ahead, chunk, is_whole)

    def _hand_over(self, ahead: _PrefetchedShard, chunk: list[Any], is_whole: bool = False) -> None:
        with self._changed:
            if chunk:
                ahead.chunks.append(chunk)
            ahead.is_whole = is_whole
            self._changed.notify_all()

    def _next(self) -> _PrefetchedShard | None:
        def first() -> _PrefetchedShard | None:
            return next((each for each in self._ahead.values() if not each.is_begun), None)

        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or first())
            ahead = None if self._is_closed else first()
            if ahead is not None:
                ahead.is_begun = True
            return ahead
