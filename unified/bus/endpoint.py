"""One process on the bus: its inbox, its calls out, its handlers.

Threads: any thread calls, and sends from there; one receives (and one more from the relay), one watches deadlines;
handlers run on a pool and on an event loop. What to do is decided by `unified.bus.calls`; this is the shell around it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from unified.bus import calls
from unified.bus.codec import Encoded, decode, encode
from unified.bus.futures import RpcFuture
from unified.bus.inbox import InboxSockets, Mail
from unified.bus.outlet import Outlet
from unified.bus.pool import HandlerPool
from unified.bus.post import PostOffice
from unified.bus.registry import RPC_REGISTRY, MethodRegistry
from unified.bus.remote import describe_ours, rebuild
from unified.bus.routes import read_policy
from unified.bus.service import MAX_HANDLER_THREADS, TRACE, CallService, InboundCall
from unified.bus.tensors import Buffer
from unified.bus.window import CALL_OVERHEAD_BYTES, Window
from unified.errors import BusOverloadedError, ProtocolError, RpcError, UsageError
from unified.protocol.envelope import (
    BUS_VERSION,
    Envelope,
    Kind,
    decode_envelope,
    decode_hello,
    decode_undelivered,
    encode_envelope,
)
from unified.protocol.records import DirectoryEntry, Inbox

logger = logging.getLogger(__name__)
LIMIT_BYTES = 256 * 1024 * 1024
LONGEST_SLEEP_S = 1.0
_NEVER = float("inf")
LINGER_MS = 500
MAX_METHOD_NAME = 1000


class _Outbound(msgspec.Struct, eq=False):
    """What the shell keeps of an open call."""

    future: RpcFuture[Any]
    target: str
    method: str
    trace_id: str
    nbytes: int
    content: Encoded | None
    """None once it was sent on a route that does not give calls back."""
    is_relayed: bool = False


class BusEndpoint:
    """The bus as one life of one worker sees it. Nothing is opened before `start`, so it may be made before a fork.

    Args:
        job_id, worker, incarnation, node: who this is, for messages.
        host_id: the same for processes that `ipc` sockets join.
        run_dir: where the ipc socket goes.
        address: of this host for others; empty: no tcp.
        relay: address of the bus relay; empty: none.
        route: ``auto``, ``tcp`` or ``relay``; ``auto`` gives way to ``UNIFIED_BUS_ROUTE``.
        registry: methods that others may call; None: those of this process.
        default_timeout_s: deadline of a call that names none; None: none but the callee's death.
        limit_bytes: in flight to one peer.
    """

    def __init__(
        self,
        *,
        job_id: str,
        worker: str,
        incarnation: int,
        node: str,
        host_id: str,
        run_dir: str,
        address: str,
        relay: str = "",
        route: str = "auto",
        registry: MethodRegistry | None = None,
        default_timeout_s: float | None = None,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        self.job_id = job_id
        self.worker = worker
        self.incarnation = incarnation
        self.node = node
        self.num_rejected = 0
        """Messages that were dropped because they could not be read, or were for somebody else."""
        self._host_id = host_id
        self._run_dir = run_dir
        self._address = address
        self._relay = relay
        self._route = route
        self._default_timeout_s = default_timeout_s
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._alarm = threading.Condition(self._lock)
        self._table = calls.CallTable()
        self._outbound: dict[int, _Outbound] = {}
        self._call_ids = itertools.count(1)
        self._window = Window(limit_bytes)
        self._pool = HandlerPool("bus-handler", MAX_HANDLER_THREADS)
        registry = RPC_REGISTRY if registry is None else registry
        self._service = CallService(registry=registry, worker=worker, node=node, reply=self._reply, pool=self._pool)
        self._wakes_at = 0.0
        """Until when the alarm thread sleeps."""
        self._last_call_at = 0.0
        self._is_closing = False
        self._inbox_id = ""
        self._pid = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> Inbox:
        """Bind the inbox, start to receive, and return where others find it.

        Raises:
            OptionError: a route that does not exist.
            UsageError: the relay is to be used, and there is none.
            ClusterError: no address could be bound.
        """
        if self._context is not None:
            raise UsageError(f"the bus of worker {self.worker} has been started already.")
        policy = read_policy(self._route, os.environ)
        if policy == "relay" and not self._relay:
            raise UsageError("the bus is to use the relay, and there is none: unset UNIFIED_BUS_ROUTE.")
        self._pid = os.getpid()
        self._inbox_id = secrets.token_hex(12)  # from the kernel: forked siblings share the state of `random`
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65536)
        try:
            self._sockets = InboxSockets(
                self._context,
                inbox_id=self._inbox_id,
                host_id=self._host_id,
                run_dir=self._run_dir,
                address=self._address,
                relay=self._relay,
                policy=policy,
            )
        except BaseException:
            self._context.destroy(0)
            raise
        self._post = PostOffice(
            self._context,
            inbox=self._sockets.inbox,
            worker=self.worker,
            policy=policy,
            relay=self._relay,
            limit_bytes=self._limit_bytes,
        )
        self._bus_threads = {*self._sockets.start(self._take, self._on_relay_lost)}
        self._thread = threading.Thread(target=self._watch_deadlines, name="bus-alarm", daemon=True)
        self._thread.start()
        self._bus_threads.add(self._thread.ident)
        return self._sockets.inbox

    def update_directory(self, entries: Sequence[DirectoryEntry]) -> None:
        """Take news of the job's directory in; from any thread, never blocks."""
        self._step(calls.NewsCame(entries=list(entries)), may_wait=False)

    def open(self) -> None:
        """The exports are complete: begin with the calls that waited for that."""
        self._service.open()

    def call(
        self,
        target: str,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        timeout: float | None = None,
        block: bool = True,
    ) -> RpcFuture[Any]:
        """Call `method` of the worker `target` (its full name) and return at once.

        Arrays, tensors and large bytes are sent from the caller's own memory: they must not be changed before the
        future has ended. A worker that is not up yet is waited for.

        Args:
            timeout: seconds from now to the call's deadline; None: the default of this endpoint.
            block: wait while too many bytes are in flight to the target; else raise.

        Raises:
            UsageError: an argument cannot be sent, or the bus was not started.
            BusOverloadedError: no room, and `block` is False.
            RpcTimeoutError: no room came before the deadline.
        """
        if self._thread is None:
            raise UsageError(f"the bus of worker {self.worker} has not been started.")
        if self._pid != os.getpid():
            raise UsageError(
                f"the bus of worker {self.worker} belongs to process {self._pid}: this one ({os.getpid()}) was forked "
                "from it and cannot call. Call in the worker itself, and hand results to its children."
            )
        if len(method) > MAX_METHOD_NAME:
            raise UsageError(f"the method name {method[:40]!r}… has {len(method)} characters.")
        timeout = self._default_timeout_s if timeout is None else timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        content = encode([list(args), kwargs])
        nbytes = content.nbytes + CALL_OVERHEAD_BYTES
        may_wait = block and threading.get_ident() not in self._bus_threads
        self._window.take(target, nbytes, block=may_wait, deadline=deadline)
        call_id = next(self._call_ids)
        future: RpcFuture[Any] = RpcFuture(
            f"the call of {method!r} to worker {target}",
            deadline=deadline,
            on_cancel=lambda: self._step(calls.CallCancelled(call_id=call_id), may_wait=False),
            bus_threads=self._bus_threads,
        )
        trace_id = TRACE.get() or f"{self._inbox_id[:8]}.{call_id}"
        self._outbound[call_id] = _Outbound(future, target, method, trace_id, nbytes, content)
        made = calls.CallMade(call_id=call_id, target=target, method=method, timeout_s=timeout)
        self._step(made, may_wait=may_wait)
        return future

    def close(self) -> None:
        """End every open call with RpcCancelledError, close the sockets, remove the ipc file, end the threads.

        A handler that is inside user code is hardly waited for; its thread ends with the process.
        """
        with self._lock:
            if self._is_closing or self._context is None or self._thread is None or self._pid != os.getpid():
                return
            self._is_closing = True
        self._step(calls.BusClosed(reason=f"the bus of worker {self.worker} was closed."), may_wait=False)
        self._window.close()
        self._service.close()
        self._pool.close()
        with self._lock:
            self._alarm.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._sockets.close()
        self._post.close(LINGER_MS)
        self._context.term()

    def _step(self, event: calls.Event, *, may_wait: bool) -> None:
        with self._lock:
            now = time.monotonic()
            actions = self._table.step(now, event)
            if type(event) is calls.CallMade:
                self._last_call_at = now
            due = self._table.next_deadline
            if due is not None and due < self._wakes_at:
                self._wakes_at = 0.0  # once is enough
                self._alarm.notify()
        for action in actions:
            self._perform(action, may_wait)

    def _perform(self, action: calls.Action, may_wait: bool) -> None:
        match action:
            case calls.SendCall(call_id=call_id, inbox=inbox, timeout_s=timeout_s):
                self._send_call(call_id, inbox, timeout_s, may_wait)
            case calls.FailCall(call_id=call_id, error=error):
                outbound = self._ended(call_id)
                if outbound is not None:
                    outbound.future.fail(error)
            case calls.SendCancel(call_id=call_id, inbox=inbox):
                envelope = encode_envelope(self._envelope(Kind.CANCEL, call_id, inbox.inbox_id))
                with contextlib.suppress(RpcError):  # lost, the handler runs on for nothing
                    self._post.outlet(inbox).try_send([envelope, b""])
            case calls.DropPeer(inbox_id=inbox_id):
                self._post.drop(inbox_id)
            case calls.AcceptAnswer():
                raise AssertionError("answers are performed where they come in")

    def _send_call(self, call_id: int, inbox: Inbox, timeout_s: float | None, may_wait: bool) -> None:
        outbound = self._outbound.get(call_id)
        if outbound is None or outbound.content is None:
            return
        envelope = self._envelope(
            Kind.CALL, call_id, inbox.inbox_id, outbound.method, timeout_s=timeout_s, trace_id=outbound.trace_id
        )
        frames = [encode_envelope(envelope), outbound.content.body, *outbound.content.buffers]
        try:
            outlet = self._post.outlet(inbox)
        except RpcError as error:
            self._step(calls.SendFailed(call_id=call_id, error=error), may_wait=False)
            return
        outbound.is_relayed = outlet.is_relay
        if not outlet.is_relay:
            outbound.content = None  # nothing gives it back
        future = outbound.future
        self._send(outlet, frames, may_wait, lambda: self._is_closing or future.done())

    def _send(self, outlet: Outlet, frames: list[Buffer], may_wait: bool, give_up: Callable[[], bool]) -> None:
        if outlet.try_send(frames):
            return
        if may_wait:
            outlet.send(frames, give_up)
        else:
            self._pool.submit(lambda: outlet.send(frames, give_up))

    def _reply(self, call: InboundCall, kind: Kind, answer: Encoded, may_wait: bool) -> None:
        envelope = self._envelope(kind, call.call_id, call.sender, call.method, trace_id=call.trace_id)
        frames = [encode_envelope(envelope), answer.body, *answer.buffers]
        inbox = self._inbox_of(call.sender, call.is_relayed)
        if inbox is None:
            return
        try:
            outlet = self._post.outlet(inbox)
        except RpcError as error:
            logger.warning("worker=%s event=answer-lost method=%s reason=%r", self.worker, call.method, str(error))
            return
        self._send(outlet, frames, may_wait, lambda: self._is_closing or call.is_stale)

    def _inbox_of(self, inbox_id: str, is_relayed: bool) -> Inbox | None:
        """Where an answer goes: the way the call came. None if its sender is known to be dead."""
        if is_relayed:
            return Inbox(inbox_id=inbox_id)
        return self._post.greeted(inbox_id) or self._table.directory.inbox(inbox_id)

    def _envelope(
        self,
        kind: Kind,
        call_id: int,
        target: str,
        method: str = "",
        *,
        timeout_s: float | None = None,
        trace_id: str = "",
    ) -> Envelope:
        return Envelope(BUS_VERSION, kind, call_id, self._inbox_id, self.worker, target, method, timeout_s, trace_id)

    def _ended(self, call_id: int) -> _Outbound | None:
        outbound = self._outbound.pop(call_id, None)
        if outbound is not None:
            self._window.give_back(outbound.target, outbound.nbytes)
        return outbound

    def _watch_deadlines(self) -> None:
        """The alarm thread: tells the table when time has passed."""
        while not self._is_closing:
            with self._lock:
                now = time.monotonic()
                due = self._table.next_deadline
                if self._is_closing:  # asked again under the lock: `close` rings only once
                    return
                if due is None or due > now:
                    self._wakes_at = self._next_look(now, due)
                    self._alarm.wait(None if self._wakes_at == _NEVER else self._wakes_at - now)
                    continue
            self._step(calls.TimePassed(), may_wait=False)

    def _next_look(self, now: float, due: float | None) -> float:
        """While there are deadlines the thread looks up every second: a call with a later one need not wake it."""
        if due is None and now - self._last_call_at > LONGEST_SLEEP_S:
            return _NEVER
        return min(now + LONGEST_SLEEP_S, _NEVER if due is None else due)

    def _take(self, mail: Mail) -> None:
        try:
            envelope = decode_envelope(mail.envelope)
            if envelope.target != self._inbox_id:
                raise ProtocolError(f"for inbox {envelope.target!r}, which is not this life's")
            self._dispatch(envelope, mail)
        except ProtocolError as error:
            self.num_rejected += 1
            if self.num_rejected == 1:
                logger.warning(
                    "worker=%s event=mail-rejected reason=%r (further ones are only counted)", self.worker, str(error)
                )
        except Exception:
            logger.exception("worker=%s event=mail-failed: the bus goes on", self.worker)

    def _dispatch(self, envelope: Envelope, mail: Mail) -> None:
        match envelope.kind:
            case Kind.CALL:
                self._service.accept(self._inbound(envelope, mail))
            case Kind.RESULT | Kind.ERROR:
                self._on_answer(envelope, mail)
            case Kind.CANCEL:
                self._service.cancel(envelope.sender, envelope.call_id)
            case Kind.HELLO:
                self._post.greet(envelope.sender, decode_hello(mail.body))
            case Kind.UNDELIVERABLE:
                self._on_undeliverable(envelope, mail)

    def _inbound(self, envelope: Envelope, mail: Mail) -> InboundCall:
        expires = None if envelope.timeout_s is None else time.monotonic() + envelope.timeout_s
        return InboundCall(
            envelope.call_id,
            envelope.sender,
            envelope.method,
            expires,
            mail.body,
            mail.buffers,
            envelope.trace_id,
            mail.is_relayed,
        )

    def _on_answer(self, envelope: Envelope, mail: Mail) -> None:
        with self._lock:
            accepted = self._table.step(
                time.monotonic(), calls.AnswerCame(call_id=envelope.call_id, sender=envelope.sender)
            )
        outbound = self._ended(envelope.call_id) if accepted else None
        if outbound is None:
            return
        try:
            if envelope.kind is Kind.RESULT:
                outbound.future.succeed(decode(mail.body, mail.buffers))
            else:
                outbound.future.fail(rebuild(mail.body, outbound.future.what))
        except ProtocolError as error:
            failure = RpcError(f"the answer to {outbound.future.what} cannot be read here: {error}")
            failure.__cause__ = error
            outbound.future.fail(failure)

    def _on_undeliverable(self, envelope: Envelope, mail: Mail) -> None:
        lost = decode_undelivered(mail.body)
        if lost.kind is Kind.CALL:
            self._step(calls.DeliveryFailed(call_id=envelope.call_id, code=lost.code), may_wait=False)
        elif lost.kind is Kind.RESULT and lost.code == "overloaded":
            error = BusOverloadedError(
                f"worker {self.worker} answered {envelope.method!r}, and the relay dropped the answer: too many bytes "
                "already wait there for the caller. Call less at once, or ask for smaller results."
            )
            ours = self._envelope(Kind.ERROR, envelope.call_id, lost.target, envelope.method)
            self._post.outlet(Inbox(inbox_id=lost.target)).try_send([encode_envelope(ours), describe_ours(error)])

    def _on_relay_lost(self) -> None:
        """Calls that were with the relay may be lost, and it keeps nothing: end them rather than wait for ever."""
        for call_id, outbound in list(self._outbound.items()):
            if outbound.is_relayed:
                error = RpcError(
                    f"the connection to the bus relay broke while {outbound.future.what} was open; whether its handler "
                    "ran is not known. Call again if it may run twice."
                )
                self._step(calls.SendFailed(call_id=call_id, error=error), may_wait=False)
