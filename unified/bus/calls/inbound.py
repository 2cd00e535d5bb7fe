"""Incoming calls, from their arrival until they are answered, and what a handler may know of its call."""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from unified.bus.buffers import Buffer
from unified.protocol.envelope import Kind

if TYPE_CHECKING:
    from unified.bus.calls.concurrency import ConcurrencyLimit
    from unified.bus.calls.future import RpcFuture
    from unified.bus.codec.codec import Encoded
    from unified.bus.streams.generator import StreamSource
    from unified.bus.streams.stream import Awaited
    from unified.bus.transport.unix_connection import UnixConnection


class Caller(NamedTuple):
    """The maker of the call that is being handled."""

    worker: str
    """Full name."""
    inbox_id: str
    """Inbox of this life of the worker."""


class InboundCall(msgspec.Struct, eq=False):
    """A call from elsewhere."""

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
    task: asyncio.Task[None] | None = None
    deferred: RpcFuture[Any] | None = None
    """The call that the handler returned: both end together, and are given up together."""
    stream: StreamSource | None = None

    @property
    def is_stale(self) -> bool:
        """True if nobody waits for the answer any more."""
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
    """Return the caller, inside a handler; None elsewhere."""
    call = CURRENT.get()
    return None if call is None else Caller(call.worker, call.sender)
