"""Deadlock monitor of one endpoint: looks at queued calls while handlers' calls are among them, and ends calls that
would wait for ever (`unified.bus.calls.deadlock.graph`)."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from traceback import walk_stack

from unified.bus.buffers import Buffer
from unified.bus.calls.client import CallClient
from unified.bus.calls.concurrency import ConcurrencyLimit
from unified.bus.calls.deadlock.graph import (
    BlockedCall,
    WaitsForGraph,
    decode_blocked,
    encode_blocked,
    name_of,
    reader_of,
)
from unified.bus.calls.inbound import InboundCall
from unified.bus.calls.retry import LATER
from unified.bus.calls.sender import OutboundCall, Sender
from unified.bus.codec.codec import SerializedValue
from unified.bus.executor import HandlerPool, LoopThread
from unified.bus.identity import BusIdentity
from unified.bus.streams.stream import Awaited, StreamFeed, waited_in_vain
from unified.errors import RpcError
from unified.protocol.envelope import Kind

logger = logging.getLogger(__name__)
LOOK_S = 0.25
_REPORTED = float("inf")
WARN_S = 10.0
"""Seconds after which the log names a call queued behind its caller's stream, or a handler that blocks the loop."""


class DeadlockMonitor:
    """Monitor that looks every `LOOK_S` while calls are queued, or other workers report blocked calls.

    Args:
        known: incoming calls that have not ended, queued ones too.
        limits: concurrency limits with their queues, guarded by `lock`.
        refuse: ends a call, if it is still queued, and says why.
    """

    def __init__(
        self,
        identity: BusIdentity,
        *,
        known: Mapping[tuple[str, int], InboundCall],
        limits: Mapping[str, ConcurrencyLimit[InboundCall]],
        lock: threading.Lock,
        sender: Sender,
        refuse: Callable[[InboundCall, str], object],
        calls: CallClient,
        loop: LoopThread,
    ) -> None:
        self._inbox_id = identity.inbox
        self._worker = identity.worker
        self._known = known
        self.outside: dict[int, Awaited] = {}
        """Calls and streams that threads and tasks outside of handlers wait for, by thread ident or negated task id."""
        self._limits = limits
        self._lock_of_limits = lock
        self._sender = sender
        self._refuse = refuse
        self._calls = calls
        self._loop = loop
        self._graph = WaitsForGraph(identity.inbox)
        self._behind: dict[str, float] = {}
        """Times since which calls are queued behind streams of their own callers; `_REPORTED`: the log says so."""
        self._lock = threading.Lock()
        self._is_looking = False
        self.is_closed = False

    def begin(self) -> None:
        """Schedule a look, unless one is scheduled."""
        if not self._is_looking:
            with self._lock:
                if self._is_looking or self.is_closed:
                    return
                self._is_looking = True
            LATER.call_after(LOOK_S, self._look)

    def hear(self, call_id: int, body: Buffer) -> None:
        """Store a callee's report of what a call made here waits for. ProtocolError: it cannot be read."""
        blocked = decode_blocked(body)
        with self._lock:
            self._graph.hear(time.monotonic(), name_of(self._inbox_id, call_id), blocked)
        self.begin()

    def begin_outside(self, awaited: Awaited, task: int) -> int:
        """Note that this thread, or the task with this id, begins to wait outside of handlers; return its key in
        `outside`. UsageError: the thread waits already, and a signal handler interrupted it."""
        strand = -task or threading.get_ident()
        outer = self.outside.get(strand)
        if outer is not None and strand not in (_reader(each) for each in _parts([outer])):
            names = [frame.f_code.co_qualname for frame, _ in walk_stack(None)]
            if sum(each in ("RpcFuture._wait", "StreamFeed.wait") for each in names) > 1:  # else an interrupt ended one
                raise waited_in_vain(awaited)
        self.outside[strand] = awaited
        return strand

    def _look(self) -> None:
        self._is_looking = False  # first: a call queued after this schedules a look
        if self.is_closed:
            return
        waiting, blocked_s = self._queued(), self._loop.blocked_s()
        self._warn(time.monotonic(), waiting, blocked_s)
        is_needed = waiting or self._loop.waits or self._graph.has_heard
        if is_needed or blocked_s or any(call.is_on_loop for call in list(self._known.values())):
            self.begin()
        if not is_needed:
            return
        calls = {_name(call): call for call, _ in waiting}
        here = [self._blocked(call, True, [_name(other) for other in admitted]) for call, admitted in waiting]
        index = _WaitIndex(self._inbox_id, self._calls.outgoing_calls())
        turns = {f"{name}^": name for name in index.known(self._loop.waits)}
        words = f"a turn on the event loop of worker {self._worker}, which a handler blocks that does not `await`"
        here += [BlockedCall(turn, self._inbox_id, words, True, [name]) for turn, name in turns.items()]
        for call in list(self._known.values()):
            name = _name(call)
            names = [reader_of(name)] if call.limit is not None and _is_parked(call) else index.names(call)
            if names := [*names, *(turns if call.is_on_loop else ())]:
                calls[name] = call
                here.append(self._blocked(call, False, names))
                readers = [reader_of(stream) for stream in index.streams_read_by(call)]
                here += [BlockedCall(reader, self._inbox_id, "its reader", False, [name]) for reader in readers]
        here += index.outside(self.outside, self._worker)
        with self._lock:
            came = {name: bool(call.chain) for name, call in calls.items()}
            findings = self._graph.look(time.monotonic(), here, came, index.ids)
        for name, blocked in findings.tell.items():
            self._sender.reply(calls[name], Kind.WAITS, SerializedValue(encode_blocked(blocked), []), False)
        for name, cycle in findings.refuse.items():
            words = f"none can go on: {cycle} -> the first of these."
            if name in calls:
                self._refuse(calls[name], f"{words} Let one of them make its call outside such a group.")
            else:
                advice = "Await calls in an `async def` handler; read a stream to its end before you wait, or close it."
                what = f"a call from worker {self._worker} was given up: calls wait for one another"
                self._calls.give_up(index.ids[turns.get(name, name)], RpcError(f"{what}, and {words} {advice}"))

    def _queued(self) -> list[tuple[InboundCall, list[InboundCall]]]:
        """Return the queued calls that handlers made or that are behind streams, each with the calls that its limit
        admitted."""
        found: list[tuple[InboundCall, list[InboundCall]]] = []
        with self._lock_of_limits:
            for limit in list(self._limits.values()):
                admitted, has_streams = limit.running[:], limit.has_streams
                found += [(call, admitted) for call in limit.waiting if has_streams or call.chain]
        return found

    def _warn(self, now: float, waiting: list[tuple[InboundCall, list[InboundCall]]], blocked_s: float) -> None:
        if blocked_s >= WARN_S and (thread := self._loop.thread) is not None and "blocked" not in thread.name:
            method = task.get_name() if (task := asyncio.current_task(self._loop.loop)) else "a callback"
            thread.name += f", blocked by {method}"  # for `unified stack`
            logger.warning(
                "worker=%s event=loop-blocked method=%r seconds=%.0f: no other `async def` handler goes on. Await "
                "calls and `asyncio.to_thread(work)`, or make the handler a plain `def`",
                *(self._worker, method, blocked_s),
            )
        was_behind, self._behind = self._behind, {}
        for call, admitted in waiting:
            if not all(_is_parked(each) and each.sender == call.sender for each in admitted):
                continue
            since = was_behind.get(_name(call), now)
            if now - since >= WARN_S:
                since = _REPORTED
                logger.warning(
                    "worker=%s event=in-line-behind-stream method=%r caller=%s stream=%r seconds=%.0f: the stream "
                    "waits to be read by the same caller. The thread that reads the stream must not wait for the "
                    "call: read the stream to its end or close it",
                    self._worker,
                    call.method,
                    call.worker,
                    admitted[0].method,
                    WARN_S,
                )
            self._behind[_name(call)] = since

    def _blocked(self, call: InboundCall, is_queued: bool, waits_for: list[str]) -> BlockedCall:
        return BlockedCall(
            _name(call), self._inbox_id, f"{call.method!r} in worker {self._worker}", is_queued, waits_for
        )


class _WaitIndex:
    """Index of the open calls by the handlers and threads that wait for them."""

    def __init__(self, inbox_id: str, calls: Iterable[OutboundCall]) -> None:
        self.ids: dict[str, int] = {}
        """Ids of all open calls, by name."""
        self._inbox_id = inbox_id
        self._names: dict[int, str] = {}
        self._streams: dict[int | None, list[StreamFeed]] = {}
        self._watched: dict[int | None, list[tuple[int, str]]] = {}
        """Threads that wait without telling the bus, and the calls they wait for, by the handler that made them."""
        self._kept: list[object] = []  # keeps the objects behind `id` alive
        for each in calls:
            awaited, handler = each.awaited, each.chain[-1] if each.chain else None
            self._kept.append(awaited)
            name = self._names[id(awaited)] = name_of(inbox_id, each.call_id)
            self.ids[name] = each.call_id
            if isinstance(awaited, StreamFeed):
                self._streams.setdefault(handler, []).append(awaited)
            if watcher := each.watcher:
                self._watched.setdefault(handler, []).append((watcher, name))

    def names(self, call: InboundCall) -> list[str]:
        if not call.waits and call.deferred is None and not self._watched:
            return []
        awaited = [*call.waits] if call.deferred is None else [*call.waits, call.deferred]
        return sorted({*self.known(awaited), *(name for _, name in self._watched.get(call.token, ()))})

    def streams_read_by(self, call: InboundCall) -> list[str]:
        """Return the names of the streams that a handler does not read now: all of it waits for something else."""
        if len(call.waits) != 1:
            return []
        streams = self._streams.get(call.token, ())
        return [self._names[id(each)] for each in streams if each is not call.waits[0]]

    def outside(self, waits: Mapping[int, object], worker: str) -> list[BlockedCall]:
        """Return the threads and tasks that wait outside of handlers (`waits`: calls and streams by thread ident or
        negated task id), and the readers of the streams that they read last."""
        streams = self._streams.get(None, ())
        if not streams:  # only a stream can wait for threads and tasks
            return []
        names = {strand: {*self.known([awaited])} for strand, awaited in list(waits.items())}
        for thread, name in self._watched.get(None, ()):
            names.setdefault(thread, set()).add(name)
        blocked = []
        for strand, awaited in names.items():
            # While a thread waits, so do all of its tasks.
            unread = [
                self._names[id(each)]
                for each in streams
                if strand in (-each.reader_task or each.reader_thread, each.reader_thread)
                and self._names[id(each)] not in awaited
            ]
            if awaited and unread:
                name = f"{self._inbox_id}:{strand}"
                what = f"{'a thread' if strand > 0 else 'a task'} of worker {worker}"
                blocked.append(BlockedCall(name, self._inbox_id, what, False, sorted(awaited)))
                blocked += [
                    BlockedCall(reader_of(each), self._inbox_id, "its reader", False, [name]) for each in unread
                ]
        return blocked

    def known(self, awaited: Iterable[object]) -> list[str]:
        return [self._names[id(each)] for each in _parts(awaited) if id(each) in self._names]


class PoolMonitor:
    """Has other threads of the handler pool stand in for threads that wait with `concurrent.futures.wait` or
    `as_completed`, which do not tell the bus. Looks only while there is work that no thread is free for."""

    def __init__(self, pool: HandlerPool, outgoing_calls: Callable[[], Iterable[OutboundCall]]) -> None:
        self._pool = pool
        self._outgoing_calls = outgoing_calls
        self._is_looking = False

    def begin(self) -> None:
        """Schedule a look: the pool is full."""
        if not self._is_looking:
            self._is_looking = True  # two threads may both begin, and look: that does no harm
            LATER.call_after(LOOK_S, self._look)

    def _look(self) -> None:
        self._is_looking = False  # first: if the pool gets full after this, it calls `begin`
        is_full = self._pool.is_full
        self._pool.presume({watcher for each in self._outgoing_calls() if (watcher := each.watcher)} if is_full else ())
        if is_full:
            self.begin()


def _is_parked(call: InboundCall) -> bool:
    return call.stream is not None and call.stream.is_parked


def _reader(awaited: object) -> int | None:
    """Return the thread that reads the connection of a wait."""
    return getattr(getattr(awaited, "link", None), "reader", None)


def _parts(awaited: Iterable[object]) -> Iterator[object]:
    """Yield each call or stream waited for, and its parts."""
    for each in awaited:
        yield each
        yield from _parts(getattr(each, "parts", ()))


def _name(call: InboundCall) -> str:
    return name_of(call.sender, call.call_id)
