"""Incoming calls, from arrival to answer, and the facts that a handler may know about its call."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from unified.bus.buffers import Buffer
from unified.errors import RouteLostError, RpcError

if TYPE_CHECKING:
    import asyncio

    from unified.bus.calls.concurrency import ConcurrencyLimit
    from unified.bus.calls.future import RpcFuture
    from unified.bus.streams.generator import StreamSource
    from unified.bus.streams.stream import Awaited
    from unified.bus.transport.unix_connection import UnixConnection


class Caller(NamedTuple):
    """The maker of the call that is being handled."""

    worker: str
    """Full name."""
    inbox_id: str
    """Inbox of the calling incarnation."""


class InboundCall(msgspec.Struct, eq=False):
    call_id: int
    sender: str
    worker: str
    """Name of the sender."""
    method: str
    expires: float | None
    """Deadline on this process's monotonic clock; None: none."""
    body: Buffer
    buffers: list[Buffer]
    trace_id: str = ""
    chain: list[int] = []
    """Tokens of the calls whose handlers led to this one, oldest first."""
    link: UnixConnection | None = None
    """Connection that the call came on and its answer takes; None: ZeroMQ."""
    is_relayed: bool = False
    is_cancelled: bool = False
    has_ended: bool = False
    """True once the handler has returned, or will never begin."""
    waits: tuple[Awaited, ...] = ()
    """Calls and streams that threads and tasks of the handler wait for now."""
    limit: ConcurrencyLimit[InboundCall] | None = None
    is_on_loop: bool = False
    task: asyncio.Task[None] | None = None
    deferred: RpcFuture[Any] | None = None
    """The future that the handler returned: both calls end together, and are given up together."""
    stream: StreamSource | None = None

    @property
    def is_stale(self) -> bool:
        """True if nobody waits for the answer any more."""
        return self.is_cancelled or (self.expires is not None and time.monotonic() >= self.expires)

    @property
    def token(self) -> int:
        """Name of the call in the chains of its handler's calls."""
        return hash((self.sender, self.call_id)) & 0xFFFFFFFF


MAX_KEPT = 10_000
"""Number of messages that may wait in a ZeroMQ socket, and be lost with its connection."""


class RecentReplies:
    """The newest calls that this worker answered. `tell(call, error)` answers a call with an error."""

    def __init__(self, worker: str, tell: Callable[[InboundCall, RpcError], object]) -> None:
        self._worker = worker
        self._tell = tell
        self._calls: deque[InboundCall] = deque(maxlen=MAX_KEPT)

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: InboundCall) -> None:
        """Remember a call that is being answered, without the value that its handler made."""
        self._calls.append(
            InboundCall(call.call_id, call.sender, call.worker, call.method, None, b"", [], is_relayed=call.is_relayed)
        )

    def lost(self, known: Iterable[InboundCall], is_concerned: Callable[[str], bool], where: str) -> None:
        """End the calls whose answers or items may have been lost with a connection: their callers would wait for ever.
        A caller that has its answer ignores the error.

        Args:
            known: calls that are not answered yet.
            is_concerned: returns True for an inbox whose messages took that connection, to `where`.
        """
        lost = [each for each in list(self._calls) if is_concerned(each.sender)]
        for call in known:
            if call.link is None and call.stream is not None and is_concerned(call.sender):
                call.stream.close()
                lost.append(call)
        for call in lost:
            error = RouteLostError(
                f"the connection of worker {self._worker} to {where} broke, and the answer to {call.method!r} "
                "may have been lost with it; its handler has run, or begun to. Call again if it may run twice."
            )
            self._tell(call, error)


CURRENT: ContextVar[InboundCall | None] = ContextVar("unified_call", default=None)
"""The call that is being handled."""


def current_call() -> Caller | None:
    """Return the caller, inside a handler; None elsewhere."""
    call = CURRENT.get()
    return None if call is None else Caller(call.worker, call.sender)
