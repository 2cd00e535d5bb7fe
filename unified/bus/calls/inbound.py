"""A call that came in, until it is answered, and what its handler may know of it."""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from unified.bus.buffers import Buffer
from unified.protocol.envelope import Kind

if TYPE_CHECKING:
    from unified.bus.calls.concurrency import Gate
    from unified.bus.calls.future import RpcFuture
    from unified.bus.codec.codec import Encoded
    from unified.bus.streams.generator import StreamSource
    from unified.bus.streams.stream import Awaited
    from unified.bus.transport.unix_connection import UnixConnection


class Caller(NamedTuple):
    """Who made the call that is being handled."""

    worker: str
    """Full name."""
    inbox_id: str
    """Of this life of it."""


class InboundCall(msgspec.Struct, eq=False):
    """A call from elsewhere."""

    call_id: int
    sender: str
    worker: str
    """Name of the sender."""
    method: str
    expires: float | None
    """On this process's monotonic clock."""
    body: Buffer
    buffers: list[Buffer]
    trace_id: str = ""
    chain: list[int] = []
    """Of the calls whose handlers led to this one, oldest first (`token`)."""
    link: UnixConnection | None = None
    """On which it came and its answer goes; None: through ZeroMQ."""
    is_relayed: bool = False
    is_cancelled: bool = False
    has_ended: bool = False
    """Its handler has returned, or it never began."""
    waits: tuple[Awaited, ...] = ()
    """What threads and tasks of its handler wait for now."""
    gate: Gate[InboundCall] | None = None
    task: asyncio.Task[None] | None = None
    deferred: RpcFuture[Any] | None = None
    """The call that its handler returned: it ends with that, and is given up with it."""
    stream: StreamSource | None = None

    @property
    def is_stale(self) -> bool:
        """Nobody waits for its answer any more."""
        return self.is_cancelled or (self.expires is not None and time.monotonic() >= self.expires)

    @property
    def token(self) -> int:
        """Names this call in the chains of those that its handler makes."""
        return hash((self.sender, self.call_id)) & 0xFFFFFFFF


class Reply(Protocol):
    """Sends an answer, or a part of one; False if it cannot be sent, or not without waiting."""

    def __call__(self, call: InboundCall, kind: Kind, answer: Encoded, may_wait: bool, count: int = 0) -> bool: ...


CURRENT: ContextVar[InboundCall | None] = ContextVar("unified_call", default=None)
"""The call that is being handled."""


def current_call() -> Caller | None:
    """Who called, inside a handler; None elsewhere."""
    call = CURRENT.get()
    return None if call is None else Caller(call.worker, call.sender)
