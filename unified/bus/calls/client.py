"""Call client, the caller's end of calls: calls go out, answers come in, deadlines pass.

The table of pending calls (`unified.bus.calls.pending`) decides; the client carries out.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from typing import Any, Protocol

from unified.bus.buffers import Buffer
from unified.bus.calls import pending
from unified.bus.calls.flow_control import CALL_OVERHEAD_BYTES, FlowControl
from unified.bus.calls.future import RpcFuture
from unified.bus.calls.inbound import CURRENT
from unified.bus.calls.registry import is_runtimes
from unified.bus.calls.remote_errors import rebuild
from unified.bus.calls.sender import OutboundCall, OutgoingPayload, Sender
from unified.bus.codec.codec import decode
from unified.bus.identity import BusIdentity
from unified.bus.streams.stream import Host, RpcStream, StreamFeed
from unified.bus.transport.connections import ConnectionTable
from unified.bus.transport.unix_connection import UnixConnection
from unified.core.directory import Change, WorkerDirectory
from unified.errors import ProtocolError, RouteLostError, RpcError
from unified.protocol.envelope import Envelope, Kind
from unified.protocol.records import DirectoryEntry, Inbox
from unified.threads import CLOSE_WITHIN_S, SerialWorker, TimerThread, start_thread

_NO_CHAIN: list[int] = []


class ClientHost(Host, Protocol):
    """The endpoint, as its client sees it."""

    def peer_gone(self, inbox_id: str) -> None:
        """Forget the process behind an inbox: it is gone."""


class CallClient:
    """The open calls of one endpoint. Only `learn` changes the directory of the job. `BusEndpoint` explains
    `default_timeout_s` and `limit_bytes`."""

    def __init__(
        self,
        host: ClientHost,
        directory: WorkerDirectory,
        identity: BusIdentity,
        sender: Sender,
        connections: ConnectionTable,
        *,
        default_timeout_s: float | None,
        limit_bytes: int,
    ) -> None:
        self._host = host
        self._trace = f"{identity.inbox[:8]}."
        self._sender = sender
        self._connections = connections
        self._default_timeout_s = default_timeout_s
        self._flow_control = FlowControl(limit_bytes)
        self.lock = self._flow_control.lock  # one lock, so that one check tells whether a signal handler may go on
        self.table = pending.CallTable(directory)
        self._outbound: dict[int, OutboundCall] = {}
        self._call_ids = itertools.count(1)
        self._reaper = SerialWorker("bus-reaper", self._cancel)
        self._resumer = SerialWorker("bus-resumer", self._send_waiting)
        self._timer = TimerThread("bus-timer", partial(self.step, pending.TimePassed()), stays=True)

    def start(self) -> None:
        self._reaper.start()
        self._resumer.start()

    def close(self, reason: str) -> None:
        """End every open call with RpcCancelledError, and the threads."""
        self.step(pending.BusClosed(reason=reason))
        self._flow_control.close()
        self._reaper.close()
        self._resumer.close()
        self._timer.close(CLOSE_WITHIN_S)

    def call(
        self,
        target: str,
        method: str,
        payload: OutgoingPayload,
        timeout: float | None,
        may_wait: bool,
        incarnation: int | None = None,
    ) -> RpcFuture[Any]:
        """Make a call; see `BusEndpoint.call`."""
        if timeout is None:
            timeout = self._default_timeout_s
        deadline = None if timeout is None else time.monotonic() + timeout
        nbytes = payload.nbytes + CALL_OVERHEAD_BYTES
        if self._sender.holding and not self._flow_control.has_room(target, nbytes):
            self._sender.release()
        self._flow_control.take(target, nbytes, block=may_wait, deadline=deadline)
        call_id = next(self._call_ids)
        future: RpcFuture[Any] = RpcFuture(
            (method, target), deadline=deadline, host=self._host, on_cancel=partial(self._cancel, call_id)
        )
        handled = CURRENT.get()
        if handled is None:
            trace_id, chain = f"{self._trace}{call_id}", _NO_CHAIN
        else:
            trace_id, chain = handled.trace_id, [*handled.chain, handled.token]
        outbound = OutboundCall(
            call_id, future, target, method, trace_id, chain, nbytes, payload, threading.get_ident()
        )
        self._outbound[call_id] = outbound
        try:
            with self.lock:
                inbox = self.table.make(time.monotonic(), call_id, target, method, timeout, incarnation)
                if timeout is not None:
                    self._mind_deadlines()
        except RpcError as error:
            self._ended(call_id)
            future.fail(error.with_traceback(None))  # a traceback would keep this frame, and so the future
        else:
            if inbox is not None:
                self._send_call(outbound, inbox, timeout, may_wait)
        return future

    def step(self, event: pending.Event) -> None:
        """Pass an event to the table, and perform the actions that the table returns."""
        later: list[RpcFuture[Any]] = []
        actions: list[pending.Action] = []
        stopped_by: BaseException | None = None
        try:
            with self.lock:
                actions = self.table.step(time.monotonic(), event)
                self._mind_deadlines()
        except BaseException as error:  # such as KeyboardInterrupt: the table returns actions only once
            stopped_by = error
            with self.lock:
                self._mind_deadlines()  # the error may have come before the timer was set
        while actions:
            try:
                while actions:
                    self._perform(actions.pop(0), later)
            except BaseException as error:
                stopped_by = error
        if stopped_by is not None:
            _call_back_elsewhere(later)
            raise stopped_by
        if type(event) is pending.TimePassed:
            _call_back_elsewhere(later)
        else:
            _call_back(later)

    def learn(self, entries: Iterable[DirectoryEntry]) -> list[Change]:
        """Merge entries of the directory; return the changes.

        The lock is held: nobody calls the next incarnation of a worker while a call of an earlier one is open.
        """
        later: list[RpcFuture[Any]] = []
        with self.lock:
            changes, actions = self.table.learn(time.monotonic(), entries)
            failed = [action for action in actions if isinstance(action, pending.FailCall)]
            ended = [(self._outbound.pop(each.call_id, None), each.error) for each in failed]
            for outbound, error in ended:
                if outbound is not None:
                    outbound.fail(error, later)
            self._mind_deadlines()
        for outbound, _ in ended:
            self._let_go(outbound)
        for action in actions[len(failed) :]:
            self._perform(action, later)
        _call_back_elsewhere(later)
        return changes

    def _mind_deadlines(self) -> None:
        """Set the timer to the next deadline, under the lock. The timer is never put off: while calls come and go, most
        deadlines find an earlier time set, and need not wake its thread."""
        due = self.table.next_deadline
        if due is not None:
            self._timer.set(due)

    def take(self, envelope: Envelope, body: Buffer, buffers: list[Buffer]) -> None:
        """Handle an answer, or an item of a stream."""
        call_id = envelope.call_id
        outbound = self._outbound.get(call_id)
        if envelope.kind is Kind.ITEM:
            inbox, feed = (None, None) if outbound is None else (outbound.inbox, outbound.feed)
            if feed is not None and inbox is not None and inbox.inbox_id == envelope.sender:
                feed.push(envelope.count, body, buffers)
            return
        try:
            self._end_with(envelope, outbound, body, buffers)
        except BaseException as error:  # such as KeyboardInterrupt on a user's thread: the answer may be half handled
            if outbound is not None:
                failure = RpcError(f"{type(error).__name__} came while the answer to {outbound.words} was read.")
                self.step(pending.SendFailed(call_id=call_id, error=failure))
                self._ended(call_id)
                outbound.fail(failure)
            raise

    def _end_with(self, envelope: Envelope, outbound: OutboundCall | None, body: Buffer, buffers: list[Buffer]) -> None:
        """Handle the last answer of a call, or the begin of a stream."""
        call_id, kind = envelope.call_id, envelope.kind
        is_last = kind is not Kind.STREAM
        with self.lock:
            is_awaited = self.table.answer(call_id, envelope.sender, is_last)
        if not is_awaited:
            inbox = None if is_last else self.table.directory.inbox(envelope.sender)
            if inbox is not None:  # a CANCEL can overtake its call; without a second one the generator waits for MORE
                self._sender.tell(Kind.CANCEL, call_id, inbox)
            return
        if not is_last:
            self._open_stream(call_id)
            return
        if self._ended(call_id) is None or outbound is None:
            return
        feed, future = outbound.feed, outbound.future
        try:
            if kind is Kind.ERROR:
                outbound.fail(rebuild(body, outbound.words))
            elif feed is not None:
                feed.end(envelope.count)
            elif future is not None:
                future.succeed(decode(body, buffers))
        except ProtocolError as error:
            outbound.fail(_unreadable(outbound, error))

    def fail(self, call_id: int, reason: ProtocolError) -> None:
        """End a call whose answer cannot be read here."""
        outbound = self._outbound.get(call_id)
        if outbound is not None:
            self.step(pending.SendFailed(call_id=call_id, error=_unreadable(outbound, reason)))

    def give_up(self, call_id: int, error: RpcError) -> None:
        """End a call whose messages were lost, and cancel it at its callee, which may go on."""
        outbound = self._outbound.get(call_id)
        self.step(pending.SendFailed(call_id=call_id, error=error))
        if outbound is not None and outbound.inbox is not None:
            self._sender.tell(Kind.CANCEL, call_id, outbound.inbox)

    def outgoing_calls(self) -> list[OutboundCall]:
        return list(self._outbound.values())

    def settle(self, quiet_s: float, within_s: float) -> None:
        """Wait until users' code has no open call, or none has ended for `quiet_s`; at most `within_s`."""
        until = time.monotonic() + within_s
        while futures := [
            each.future
            for each in list(self._outbound.values())
            if each.future is not None and not is_runtimes(each.method)
        ]:
            left_s = min(quiet_s, until - time.monotonic())
            if left_s <= 0 or not wait(futures, left_s, FIRST_COMPLETED).done:
                return

    def relay_lost(self) -> None:
        """End the calls that went through the relay. It keeps nothing: they may be lost, and would wait for ever."""
        for call_id, outbound in list(self._outbound.items()):
            if outbound.is_relayed:
                error = RouteLostError(
                    f"the connection to the bus relay broke while {outbound.words} was open; whether its "
                    "handler ran is not known. Call again if it may run twice."
                )
                self.give_up(call_id, error)

    def detoured(self, inbox_id: str) -> None:
        """Mark the calls that waited for a connection to this inbox as relayed."""
        for outbound in list(self._outbound.values()):
            if outbound.inbox is not None and outbound.inbox.inbox_id == inbox_id:
                outbound.is_relayed = True

    def _cancel(self, call_id: int) -> None:
        self.lock.check()
        self.step(pending.CallCancelled(call_id=call_id))

    def _perform(self, action: pending.Action, later: list[RpcFuture[Any]]) -> None:
        match action:
            case pending.SendWaiting(target=target):
                self._resumer.put(target)
            case pending.FailCall(call_id=call_id, error=error):
                outbound = self._outbound.get(call_id)
                try:
                    outbound = self._ended(call_id)
                finally:  # also if `_ended` was interrupted
                    if outbound is not None:
                        outbound.fail(error, later)
            case pending.SendCancel(call_id=call_id, inbox=inbox):
                self._sender.tell(Kind.CANCEL, call_id, inbox)
            case pending.DropPeer(inbox_id=inbox_id):
                self._host.peer_gone(inbox_id)

    def _send_waiting(self, target: str) -> None:
        """Send waiting calls on a thread of its own: news and deadlines cannot wait for connections and large
        copies."""
        with self.lock:
            released = self.table.release(time.monotonic(), target)
        for each in released:
            outbound = self._outbound.get(each.call_id)
            if outbound is not None:
                self._send_call(outbound, each.inbox, each.timeout_s, False)
        if released:
            self._resumer.put(target)  # behind other workers

    def _send_call(self, outbound: OutboundCall, inbox: Inbox, timeout_s: float | None, may_wait: bool) -> None:
        if outbound.payload is None or outbound.future is None:
            return
        try:
            connection = self._connections.connection(inbox)
        except RpcError as error:
            self.step(pending.SendFailed(call_id=outbound.call_id, error=error))
            return
        except OSError as error:
            self.step(pending.LinkLost(inbox_id=inbox.inbox_id, reason=str(error)))
            return
        payload, future = outbound.payload, outbound.future
        outbound.inbox = inbox
        if not connection.may_give_back:
            outbound.payload = None
        elif connection.is_relay:
            outbound.is_relayed = True
        if isinstance(connection, UnixConnection):
            outbound.link = connection
            future.comes_on(connection)
        try:
            self._sender.call(connection, outbound, payload, inbox.inbox_id, timeout_s, may_wait)
        except Exception as error:
            failure = RpcError(f"{outbound.words} could not be sent: {type(error).__name__}: {error}")
            self.step(pending.SendFailed(call_id=outbound.call_id, error=failure))

    def _open_stream(self, call_id: int) -> None:
        outbound = self._outbound.get(call_id)
        if outbound is None or outbound.future is None or outbound.inbox is None:
            return
        inbox, link, future = outbound.inbox, outbound.link, outbound.future
        feed = StreamFeed(
            outbound.words,
            send_more=lambda count: self._sender.tell(Kind.MORE, call_id, inbox, count),
            cancel=partial(self._cancel, call_id),
            abandon=partial(self._reaper.put, call_id),
            link=link,
            host=self._host,
        )
        feed.reader_thread = outbound.made_on
        stream: RpcStream[Any] = RpcStream(feed)
        with self.lock:
            if call_id not in self._outbound:  # the call and its future have ended meanwhile
                return
            outbound.feed = feed
            outbound.future = None  # keep no reference: a dropped stream must be collected
            if link is not None:
                link.want()
        future.succeed(stream)

    def _ended(self, call_id: int) -> OutboundCall | None:
        with self.lock:  # from here on, `_open_stream` opens no stream
            outbound = self._outbound.pop(call_id, None)
        self._let_go(outbound)
        return outbound

    def _let_go(self, outbound: OutboundCall | None) -> None:
        if outbound is not None:
            self._flow_control.give_back(outbound.target, outbound.nbytes)
            if outbound.feed is not None and outbound.link is not None:
                outbound.link.unwant()


def _call_back(futures: list[RpcFuture[Any]]) -> None:
    for future in futures:
        future.call_back()


def _call_back_elsewhere(futures: list[RpcFuture[Any]]) -> None:
    """Call done callbacks on another thread: a slow one must not hold up deadlines or news."""
    if not futures:
        return
    try:
        start_thread("bus-callbacks", _call_back, futures)
    except RuntimeError:  # the system has no thread to give
        _call_back(futures)


def _unreadable(outbound: OutboundCall, reason: ProtocolError) -> RpcError:
    error = RpcError(f"the answer to {outbound.words} cannot be read here: {reason}")
    error.__cause__ = reason
    return error
