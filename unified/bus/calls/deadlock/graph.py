"""Deadlock detection on the waits-for graph of calls, over any number of workers, and the call that breaks a cycle.
Pure.

Source: Chandy, Misra and Haas, *Distributed Deadlock Detection*, ACM TOCS 1983. Their probes follow the edges of the
graph from process to process; a probe that returns to its start has found a cycle. This module differs in three ways:

- There are two kinds of waits. A queued call goes on when **any** call that its limit has admitted ends (OR). A handler
  goes on when **all** calls that it waits for have ended (AND; a handler that needs only the first of several is
  treated as if it needed all). A probe serves only one kind. Here the graph is reduced: calls that may go on are
  removed until none of these is left (`stuck`). The remaining calls, and no others, are deadlocked.
- Messages go against the edges: a worker tells the callers of its blocked calls what these calls wait for, directly or
  not, as far as it knows. So each worker learns every cycle that contains its own calls.
- One call is refused: the queued call of the cycle whose name comes first, so that all workers choose the same.

A generator that may not run further ahead waits for its reader, and holds its limit meanwhile. Only the caller knows
the reader. So in a cycle through a reader, the caller ends a call of its own: a queued one, or else one that leads
there.

Reports stay true while a cycle exists: none of its calls ends, because each needs another one to end first. Only a wait
that was given up makes an edge false, so reports of other workers are soon forgotten.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

from unified.errors import ProtocolError
from unified.protocol.framing import UNREADABLE

REPEAT_S = 2.0
"""Seconds after which an unchanged report is sent again; a changed one goes at once."""
KEEP_S = 5.0
"""Seconds for which a report of another worker counts."""
MAX_REPORTED = 256
"""Most blocked calls in one message."""


class BlockedCall(msgspec.Struct, frozen=True, array_like=True):
    call: str
    """Name of the call, the same in all workers (`name_of`)."""
    inbox: str
    """Inbox of its callee."""
    words: str
    is_queued: bool
    """True if the call needs one of `waits_for` to end (OR); False: all of them (AND)."""
    waits_for: list[str]


class Findings(NamedTuple):
    """Outcome of a look at the calls that are blocked here, by the name of the call."""

    tell: dict[str, list[BlockedCall]]
    """Reports for callers."""
    refuse: dict[str, str]
    """Calls to end, queued here or made here, each with its cycle in words."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[BlockedCall])


def name_of(caller_inbox: str, call_id: int) -> str:
    """Return the name of a call, whose parts both ends know."""
    return f"{caller_inbox}.{call_id}"


def reader_of(stream: str) -> str:
    """Return the name of a stream's reader, which is blocked while its handler is blocked."""
    return f"{stream}>"


def encode_blocked(blocked: list[BlockedCall]) -> bytes:
    return _encoder.encode(blocked)


def decode_blocked(body: bytes | bytearray | memoryview) -> list[BlockedCall]:
    """Decode the body of a WAITS; ProtocolError if it is none."""
    try:
        return _decoder.decode(body)
    except UNREADABLE as error:
        raise ProtocolError(f"not the body of a WAITS: {error}") from None


class WaitsForGraph:
    """The waits-for graph as one worker knows it: its own blocked calls, and those that other workers reported."""

    def __init__(self, inbox_id: str) -> None:
        self._inbox_id = inbox_id
        self._heard: dict[str, tuple[float, list[BlockedCall]]] = {}
        self._reported: dict[str, tuple[float, list[BlockedCall]]] = {}
        self._seen: set[str] = set()
        """Calls that were blocked at the last look."""

    @property
    def has_heard(self) -> bool:
        """True while a report of another worker counts."""
        return bool(self._heard)

    def hear(self, now: float, call: str, blocked: list[BlockedCall]) -> None:
        """Store a callee's report of what a call made here waits for."""
        self._heard.pop(call, None)  # the newest must be last: it wins
        self._heard[call] = (now, blocked)

    def look(
        self, now: float, here: list[BlockedCall], came: Mapping[str, bool], made_here: Collection[str] = ()
    ) -> Findings:
        """Return whom to tell of the calls blocked here now, and which calls to end.

        Args:
            here: all calls blocked here.
            came: the incoming calls; True: a handler made it. Others block nobody, unless their caller holds a stream.
            made_here: names of the calls that this worker made.
        """
        self._heard = {call: heard for call, heard in self._heard.items() if heard[0] + KEEP_S > now}
        graph = {each.call: each for _, blocked in self._heard.values() for each in blocked}
        # This worker knows its own blocked calls best.
        graph = {call: each for call, each in graph.items() if each.inbox != self._inbox_id}
        graph |= {each.call: each for each in here}
        dead = stuck(graph)
        refuse: dict[str, str] = {}
        for each in dead.values():
            is_ours = each.inbox == self._inbox_id or (each.call in made_here and _is_through_reader(each.call, dead))
            if each.is_queued and is_ours and is_to_be_refused(each.call, dead):
                refuse[each.call] = in_words(each.call, dead)
        if not refuse:
            ours = [call for call in dead if call in made_here and _is_through_reader(call, dead)]
            ours = [call for call in ours if reader_of(call) not in dead[call].waits_for]  # not the stream itself
            refuse |= {call: in_words(call, dead) for call in ours if call == _first_of(ours, call, dead)}
        reported, self._reported = self._reported, {}
        tell: dict[str, list[BlockedCall]] = {}
        for each in here:
            if each.call not in came or each.call in refuse or each.call not in self._seen:
                continue
            if not came[each.call] and not _is_through_reader(each.call, graph):
                continue
            if not each.is_queued and not any(call in graph for call in each.waits_for):
                continue
            blocked = [graph[call] for call in reach(each.call, graph)][:MAX_REPORTED]
            reported_at, was_reported = reported.get(each.call, (-REPEAT_S, []))
            if blocked != was_reported or reported_at + REPEAT_S <= now:
                tell[each.call] = blocked
                reported_at = now
            self._reported[each.call] = (reported_at, blocked)
        self._seen = {each.call for each in here}
        return Findings(tell, refuse)


def stuck(graph: dict[str, BlockedCall]) -> dict[str, BlockedCall]:
    """Reduce the graph: return the calls that can never go on, even if all unknown calls end."""
    dead = dict(graph)
    while free := [
        call
        for call, each in dead.items()
        if not each.waits_for or not (all if each.is_queued else any)(other in dead for other in each.waits_for)
    ]:
        for call in free:
            del dead[call]
    return dead


def is_to_be_refused(call: str, dead: dict[str, BlockedCall]) -> bool:
    """Return True if this queued call must be refused to break its cycle: its name comes first, so that all workers
    choose the same call. A cycle that waits for another cycle is left until the other is broken."""
    others = reach(call, dead, beyond=True)
    if call not in others:
        return False
    queued = [other for other in others if dead[other].is_queued]
    return call == min(queued) and all(call in reach(other, dead, beyond=True) for other in queued)


def _is_through_reader(call: str, graph: dict[str, BlockedCall]) -> bool:
    return any(other == reader_of(stream) for stream in reach(call, graph) for other in graph[stream].waits_for)


def _first_of(made_here: Collection[str], call: str, dead: dict[str, BlockedCall]) -> str:
    """Return the first of the calls made here that are in a cycle with `call`; empty: there is no cycle."""
    others = reach(call, dead, beyond=True)
    return min(other for other in others if other in made_here) if call in others else ""


def in_words(call: str, dead: dict[str, BlockedCall]) -> str:
    """Return the shortest cycle through a call, for messages."""
    path = {other: [call] for other in dead[call].waits_for if other in dead}
    queue = list(path)
    for other in queue:
        if other == call:
            break
        for further in dead[other].waits_for:
            if further in dead and further not in path:
                path[further] = [*path[other], other]
                queue.append(further)
    return " -> ".join(f"{dead[each].words} {_STATES[dead[each].is_queued]}" for each in path.get(call, [call]))


def reach(call: str, graph: dict[str, BlockedCall], *, beyond: bool = False) -> list[str]:
    """Return the blocked calls that a call waits for, directly or not, the nearest first. The call itself comes before
    them; with `beyond`, it is there only if a path leads back to it."""
    queue = [other for other in dict.fromkeys(graph[call].waits_for) if other in graph] if beyond else [call]
    found = set(queue)
    for each in queue:
        new = [other for other in dict.fromkeys(graph[each].waits_for) if other in graph and other not in found]
        queue += new
        found.update(new)
    return queue


_STATES = {True: "(in line)", False: "(waits)"}
