"""Looks at the calls in line at gates, as long as there are any that handlers made, and has those refused that would
wait for ever (`unified.bus.calls.deadlock.graph`)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

from unified.bus.buffers import Buffer
from unified.bus.calls.concurrency import Gate
from unified.bus.calls.deadlock.graph import Circles, Findings, Halted, decode_halted, encode_halted, name_of, reader_of
from unified.bus.calls.inbound import InboundCall, Reply
from unified.bus.calls.retry import LATER
from unified.bus.codec.codec import Encoded
from unified.bus.identity import BusIdentity
from unified.bus.streams.stream import StreamFeed
from unified.errors import RpcError
from unified.protocol.envelope import Kind

logger = logging.getLogger(__name__)
LOOK_S = 0.25
_TOLD = float("inf")
WARN_S = 10.0
"""A call in line behind a stream that its own caller does not read may wait for ever; after so long the log says so."""


class OutgoingCall(NamedTuple):
    """An open call that was made here."""

    call_id: int
    awaited: object
    """Its future, or its feed."""
    handler: int | None
    """Token of the call whose handler made it; None: it was made outside of handlers."""
    watcher: int
    """Ident of the thread that waits for it with `concurrent.futures.wait`, say, which does not tell the bus; or 0."""


class OpenCalls(Protocol):
    """The calls that were made here and are open (`unified.bus.calls.client`)."""

    def outgoing(self) -> list[OutgoingCall]: ...
    def give_up(self, call_id: int, error: RpcError) -> None: ...


class LineWatch:
    """Looks every `LOOK_S` as long as there is something to see.

    Args:
        known: its calls that have not ended, those in line too.
        gates: what they are in line at.
        lock: of the gates.
        reply: tells a caller.
        refuse: ends a call, if it is in line still, and says why.
        calls: those that were made here.
    """

    def __init__(
        self,
        identity: BusIdentity,
        *,
        known: Mapping[tuple[str, int], InboundCall],
        gates: Mapping[str, Gate[InboundCall]],
        lock: threading.Lock,
        reply: Reply,
        refuse: Callable[[InboundCall, str], object],
        calls: OpenCalls,
    ) -> None:
        self._inbox_id = identity.inbox
        self._worker = identity.worker
        self._known = known
        self._outside: dict[int, object] = {}
        """What is waited for outside of handlers, by the idents of threads and minus the ids of tasks."""
        self._gates = gates
        self._lock_of_gates = lock
        self._reply = reply
        self._refuse = refuse
        self._calls = calls
        self._circles = Circles(identity.inbox)
        self._behind: dict[str, float] = {}
        """Calls in line behind streams that their own callers do not read, since when; `_TOLD`: the log says so."""
        self._lock = threading.Lock()
        self._is_looking = False
        self._is_closed = False

    def begin(self) -> None:
        """There is something to see."""
        if not self._is_looking:
            with self._lock:
                if self._is_looking or self._is_closed:
                    return
                self._is_looking = True
            LATER.call_after(LOOK_S, self._look)

    def hear(self, call_id: int, body: Buffer) -> None:
        """The callee of a call made here says what it waits for.

        Raises:
            ProtocolError: it says nothing that can be read.
        """
        halted = decode_halted(body)
        with self._lock:
            self._circles.hear(time.monotonic(), name_of(self._inbox_id, call_id), halted)
        self.begin()

    def begin_outside(self, awaited: object, task: int) -> int:
        """Outside of handlers this thread is about to wait, or the task of this id; give what comes back to
        `end_outside`."""
        strand = -task or threading.get_ident()
        self._outside[strand] = awaited
        return strand

    def end_outside(self, strand: int) -> None:
        """It waits no more."""
        self._outside.pop(strand, None)

    def close(self) -> None:
        """Look no more."""
        self._is_closed = True

    def _look(self) -> None:
        self._is_looking = False  # first: what gets in line from here on asks again
        if self._is_closed:
            return
        waiting = self._in_line()
        calls = {_name(call): call for call, _ in waiting}
        here = [self._halted(call, True, [_name(other) for other in let_in]) for call, let_in in waiting]
        outgoing = _OutgoingCalls(self._inbox_id, self._calls.outgoing())
        for call in list(self._known.values()):
            name = _name(call)
            if call.gate is not None and _is_parked(call):
                calls[name] = call
                here.append(self._halted(call, False, [reader_of(name)]))
            elif names := outgoing.names(call):
                calls[name] = call
                here.append(self._halted(call, False, names))
                readers = [reader_of(stream) for stream in outgoing.streams_read_by(call)]
                here += [Halted(reader, self._inbox_id, "its reader", False, [name]) for reader in readers]
        here += outgoing.outside(self._outside, self._worker)
        findings = self._decide(here, {name: bool(call.chain) for name, call in calls.items()}, outgoing.ids)
        for name, halted in findings.tell.items():
            self._reply(calls[name], Kind.WAITS, Encoded(encode_halted(halted), []), False)
        for name, circle in findings.refuse.items():
            words = f"none goes on: {circle} -> the first of these."
            if name in calls:
                self._refuse(calls[name], f"{words} Have one of them call where it is in no such group.")
            else:
                advice = "Read the stream to its end before you wait for the call, or close it."
                what = f"a call from worker {self._worker} was given up: calls wait for one another"
                self._calls.give_up(outgoing.ids[name], RpcError(f"{what}, and {words} {advice}"))
        self._warn(time.monotonic(), waiting)
        if waiting or self._circles.has_heard:
            self.begin()

    def _in_line(self) -> list[tuple[InboundCall, list[InboundCall]]]:
        """Calls in line that handlers made or that are behind streams, and for each those that its gate has let in."""
        found: list[tuple[InboundCall, list[InboundCall]]] = []
        with self._lock_of_gates:
            for gate in list(self._gates.values()):
                let_in, has_streams = gate.running[:], gate.has_streams
                found += [(call, let_in) for call in gate.waiting if has_streams or call.chain]
        return found

    def _warn(self, now: float, waiting: list[tuple[InboundCall, list[InboundCall]]]) -> None:
        was_behind, self._behind = self._behind, {}
        for call, let_in in waiting:
            if not all(_is_parked(each) and each.sender == call.sender for each in let_in):
                continue
            since = was_behind.get(_name(call), now)
            if now - since >= WARN_S:
                since = _TOLD
                logger.warning(
                    "worker=%s event=in-line-behind-stream method=%r caller=%s stream=%r seconds=%.0f: the stream "
                    "waits to be read by the same caller. Whoever reads it must not wait for the call: read it to its "
                    "end or close it",
                    self._worker,
                    call.method,
                    call.worker,
                    let_in[0].method,
                    WARN_S,
                )
            self._behind[_name(call)] = since

    def _decide(self, here: list[Halted], came: Mapping[str, bool], made_here: Collection[str]) -> Findings:
        with self._lock:
            return self._circles.look(time.monotonic(), here, came, made_here)

    def _halted(self, call: InboundCall, is_in_line: bool, waits_for: list[str]) -> Halted:
        return Halted(_name(call), self._inbox_id, f"{call.method!r} in worker {self._worker}", is_in_line, waits_for)


class _OutgoingCalls:
    """Which calls a handler waits for."""

    def __init__(self, inbox_id: str, outgoing: Iterable[OutgoingCall]) -> None:
        self.ids: dict[str, int] = {}
        """Of all, by name."""
        self._inbox_id = inbox_id
        self._names: dict[int, str] = {}
        self._streams: dict[int | None, list[StreamFeed]] = {}
        self._watched: dict[int | None, list[tuple[int, str]]] = {}
        """Calls by who made them, and the threads that watch them."""
        self._kept = list(outgoing)  # so that what `id` names is there
        for each in self._kept:
            name = self._names[id(each.awaited)] = name_of(inbox_id, each.call_id)
            self.ids[name] = each.call_id
            if isinstance(each.awaited, StreamFeed):
                self._streams.setdefault(each.handler, []).append(each.awaited)
            if each.watcher:
                self._watched.setdefault(each.handler, []).append((each.watcher, name))

    def names(self, call: InboundCall) -> list[str]:
        """Of the calls that its handler waits for."""
        if not call.waits and call.deferred is None and not self._watched:
            return []
        awaited = [*call.waits] if call.deferred is None else [*call.waits, call.deferred]
        return sorted({*self._known(awaited), *(name for _, name in self._watched.get(call.token, ()))})

    def streams_read_by(self, call: InboundCall) -> list[str]:
        """Those that its handler does not read now, since all of it waits for something else."""
        if len(call.waits) != 1:
            return []
        streams = self._streams.get(call.token, ())
        return [self._names[id(each)] for each in streams if each is not call.waits[0]]

    def outside(self, waits: Mapping[int, object], worker: str) -> list[Halted]:
        """Threads and tasks that wait outside of handlers, and with them the streams that they were the last to read.

        Args:
            waits: for what, by ident of a thread, or minus the id of a task.
        """
        streams = self._streams.get(None, ())
        if not streams:  # nothing else can be waiting for them
            return []
        names = {strand: {*self._known([awaited])} for strand, awaited in list(waits.items())}
        for thread, name in self._watched.get(None, ()):
            names.setdefault(thread, set()).add(name)
        halted = []
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
                halted.append(Halted(name, self._inbox_id, what, False, sorted(awaited)))
                halted += [Halted(reader_of(each), self._inbox_id, "its reader", False, [name]) for each in unread]
        return halted

    def _known(self, awaited: Iterable[object]) -> list[str]:
        return [self._names[id(each)] for each in _parts(awaited) if id(each) in self._names]


def _is_parked(call: InboundCall) -> bool:
    return call.stream is not None and call.stream.is_parked


def _parts(awaited: Iterable[object]) -> Iterator[object]:
    """What is waited for, and what that is made of."""
    for each in awaited:
        yield each
        yield from _parts(getattr(each, "parts", ()))


def _name(call: InboundCall) -> str:
    return name_of(call.sender, call.call_id)
