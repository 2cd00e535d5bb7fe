"""Lines of a run as server-sent events, with comments between them, so that no proxy closes a quiet stream.

event: line      data: one line that a rank printed, as ``[trainer-0] line``
event: error     data: reason why the stream ends early
event: end       data: status of the run, as JSON
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi.responses import StreamingResponse

from unified.errors import UnifiedError
from unified_gateway.http.admission import Receive, Scope, Send

KEEP_ALIVE_S = 15.0
MAX_WAITING = 1000
"""Most lines that are read ahead of a slow client."""
MAX_BATCH = 200


def encode_event(event: str, data: str) -> bytes:
    """Return one event. Data of several lines has a field for each."""
    lines = "".join(f"data: {line}\n" for line in data.splitlines() or [""])
    return f"event: {event}\n{lines}\n".encode(errors="replace")


async def stream_events(
    lines: AsyncIterator[str], final: Callable[[], Awaitable[str]], *, keep_alive_s: float = KEEP_ALIVE_S
) -> AsyncGenerator[bytes]:
    """Yield the events of a follower of logs.

    Args:
        lines: a separate task reads them, and ends with this iterator.
        final: returns the data of the last event.
    """
    waiting: asyncio.Queue[str | None] = asyncio.Queue(MAX_WAITING)

    async def pump() -> None:
        try:
            async for line in lines:
                await waiting.put(line)
        finally:
            with contextlib.suppress(asyncio.QueueFull):  # a full queue wakes the other side, too
                waiting.put_nowait(None)
            if isinstance(lines, AsyncGenerator):
                await lines.aclose()

    reader = asyncio.create_task(pump())
    try:
        yield b": connected\n\n"
        while not (reader.done() and waiting.empty()):
            try:
                async with asyncio.timeout(keep_alive_s):
                    line = await waiting.get()
            except TimeoutError:
                yield b": waiting\n\n"
                continue
            batch = [] if line is None else [encode_event("line", line)]
            while len(batch) < MAX_BATCH and not waiting.empty():
                if (line := waiting.get_nowait()) is not None:
                    batch.append(encode_event("line", line))
            if batch:
                yield b"".join(batch)
        try:
            reader.result()
            yield encode_event("end", await final())
        except UnifiedError as error:
            yield encode_event("error", str(error))
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


class ClosingStream(StreamingResponse):
    """Stream that always closes its source at its end; a generator alone would wait for garbage collection.

    Args:
        when_closed: called at the end of the stream.
    """

    def __init__(
        self, parts: AsyncIterator[bytes], *, when_closed: Callable[[], None] = lambda: None, **more: Any
    ) -> None:
        super().__init__(parts, **more)
        self._when_closed = when_closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._when_closed()
            if isinstance(self.body_iterator, AsyncGenerator):
                await self.body_iterator.aclose()
