"""A stream that was asked for and has perhaps not begun yet."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from unified.bus.calls.future import RpcFuture
from unified.bus.streams.stream import RpcStream
from unified.errors import UsageError

T = TypeVar("T")


class PromisedStream(RpcStream[T]):
    """The stream that a call will be answered with. Only reading waits for that.

    Args:
        future: of the call.
    """

    def __init__(self, future: RpcFuture[Any]) -> None:
        self._future = future
        self._stream: RpcStream[T] | None = None
        self._is_over = False
        self.what = future.what

    def __next__(self) -> T:
        if self._is_over:
            raise StopIteration
        if self._stream is None:
            try:
                self._begin(self._future.result())
            except Exception:
                self._is_over = True
                raise
        assert self._stream is not None
        return next(self._stream)

    async def __anext__(self) -> T:
        if self._is_over:
            raise StopAsyncIteration
        if self._stream is None:
            try:  # shielded: a consumer that is cancelled at its first item, or at a later one, may come back
                self._begin(await asyncio.shield(asyncio.ensure_future(self._future)))
            except Exception:
                self._is_over = True
                raise
        assert self._stream is not None
        return await anext(self._stream)

    def close(self) -> None:
        """Want no more: the generator is told to stop, or never begins. Never waits."""
        self._is_over = True
        if not self._future.cancel() and self._future.exception() is None:
            stream = self._future.result()
            if isinstance(stream, RpcStream):
                stream.close()

    def __del__(self) -> None:
        """The stream inside has its own; before there is one, the endpoint alone will hold it, and drop it."""

    def _begin(self, stream: Any) -> None:
        if not isinstance(stream, RpcStream):
            raise UsageError(
                f"{self.what} was asked for a stream and returned {type(stream).__name__}: its handler is no generator."
            )
        self._stream = stream
