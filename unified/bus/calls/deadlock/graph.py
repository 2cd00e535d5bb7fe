"""Calls that wait for one another in a circle, through any number of workers: how one is found, and broken. Pure.

A call is *halted* in one of two ways. It is in line at a gate, and goes on when **any** of the calls that the gate has
let in ends. Or its handler waits for calls that it made, and goes on when **all** of them have ended (a handler that
would go on with the first of several is taken to need them all). A worker tells the callers of its halted calls what
these wait for, and all that it has heard of those; so what is known goes back along open calls until it comes round.

A generator that is as far ahead of its reader as it may be waits for that reader, and holds its gate meanwhile. Of its
reader only the caller knows; so where the way leads through one it is the caller that ends a call: one of its own that
is in line or, if none is, one of its own that leads there.

What was true once is true still, whenever it was heard: none of the calls in a circle has ended, for each needs another
of them to end first. Only a wait that was given up can make it untrue; so what was heard is soon forgotten.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from unified.errors import ProtocolError
from unified.protocol.framing import UNREADABLE

REPEAT_S = 2.0
"""A caller that was told is told again after so long, or when there is news."""
KEEP_S = 5.0
"""What was heard counts for so long."""
MOST_TOLD = 256
"""Halted calls in one message."""


class Halted(msgspec.Struct, frozen=True, array_like=True):
    """A call that does not go on."""

    call: str
    """Its name, in all workers the same (`name_of`)."""
    inbox: str
    """Of its callee."""
    words: str
    is_in_line: bool
    """It needs one of `waits_for` to end; else all of them."""
    waits_for: list[str]


class Findings(NamedTuple):
    """What a look at the calls that are halted here came to, by the name of the call."""

    tell: dict[str, list[Halted]]
    """Callers that are to be told, and what."""
    refuse: dict[str, str]
    """Calls that are in line for ever, and the circle in words: those in line here, and those made here."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Halted])


def name_of(caller_inbox: str, call_id: int) -> str:
    """A call's name, of which both its ends know the parts."""
    return f"{caller_inbox}.{call_id}"


def reader_of(stream: str) -> str:
    """The name of what reads the stream that a call has become; it is halted while the handler it belongs to is."""
    return f"{stream}>"


def encode_halted(halted: list[Halted]) -> bytes:
    """The body of a WAITS."""
    return _encoder.encode(halted)


def decode_halted(body: bytes | bytearray | memoryview) -> list[Halted]:
    """The body of a WAITS; ProtocolError if it is none."""
    try:
        return _decoder.decode(body)
    except UNREADABLE as error:
        raise ProtocolError(f"not the body of a WAITS: {error}") from None


class Circles:
    """What one worker knows of halted calls, its own and others'.

    Args:
        inbox_id: of this worker.
    """

    def __init__(self, inbox_id: str) -> None:
        self._inbox_id = inbox_id
        self._heard: dict[str, tuple[float, list[Halted]]] = {}
        self._told: dict[str, tuple[float, list[Halted]]] = {}
        self._seen: set[str] = set()
        """Calls that were halted at the last look."""

    @property
    def has_heard(self) -> bool:
        """Something that counts still was heard before the last look, or since."""
        return bool(self._heard)

    def hear(self, now: float, call: str, halted: list[Halted]) -> None:
        """The callee of a call that was made here says what it waits for."""
        self._heard.pop(call, None)  # the newest is to be the last
        self._heard[call] = (now, halted)

    def look(
        self, now: float, here: list[Halted], came: Mapping[str, bool], made_here: Collection[str] = ()
    ) -> Findings:
        """What is to be done about the calls halted here now.

        Args:
            here: all of them.
            came: those of them that are calls from elsewhere, and whether a handler made them. The others are in
                nobody's way, but for those whose caller holds a stream.
            made_here: calls to others.
        """
        self._heard = {call: heard for call, heard in self._heard.items() if heard[0] + KEEP_S > now}
        graph = {each.call: each for _, halted in self._heard.values() for each in halted}
        # Of what is halted here nobody else knows better.
        graph = {call: each for call, each in graph.items() if each.inbox != self._inbox_id}
        graph |= {each.call: each for each in here}
        dead = stuck(graph)
        refuse: dict[str, str] = {}
        for each in dead.values():
            is_ours = each.inbox == self._inbox_id or (each.call in made_here and _is_through_reader(each.call, dead))
            if each.is_in_line and is_ours and is_to_be_refused(each.call, dead):
                refuse[each.call] = in_words(each.call, dead)
        if not refuse:
            ours = [call for call in dead if call in made_here and _is_through_reader(call, dead)]
            ours = [call for call in ours if reader_of(call) not in dead[call].waits_for]  # a stream is to be read on
            refuse |= {call: in_words(call, dead) for call in ours if call == _first_of(ours, call, dead)}
        told, self._told = self._told, {}
        tell: dict[str, list[Halted]] = {}
        for each in here:
            if each.call not in came or each.call in refuse or each.call not in self._seen:
                continue
            if not came[each.call] and not _is_through_reader(each.call, graph):
                continue
            if not each.is_in_line and not any(call in graph for call in each.waits_for):
                continue
            halted = [graph[call] for call in reach(each.call, graph)][:MOST_TOLD]
            told_at, was_told = told.get(each.call, (-REPEAT_S, []))
            if halted != was_told or told_at + REPEAT_S <= now:
                tell[each.call] = halted
                told_at = now
            self._told[each.call] = (told_at, halted)
        self._seen = {each.call for each in here}
        return Findings(tell, refuse)


def stuck(graph: dict[str, Halted]) -> dict[str, Halted]:
    """Those that never go on, whatever the calls do of which nothing is known, with their edges to one another."""
    dead = dict(graph)
    while free := [
        call
        for call, each in dead.items()
        if not each.waits_for or not (all if each.is_in_line else any)(other in dead for other in each.waits_for)
    ]:
        for call in free:
            del dead[call]
    return dead


def is_to_be_refused(call: str, dead: dict[str, Halted]) -> bool:
    """Whether this call in line is the one of its circle that breaks it: of all that could, the one whose name comes
    first, so that all workers choose the same. A circle that waits for another one is left until that is broken."""
    others = reach(call, dead, beyond=True)
    if call not in others:
        return False
    in_line = [other for other in others if dead[other].is_in_line]
    return call == min(in_line) and all(call in reach(other, dead, beyond=True) for other in in_line)


def _is_through_reader(call: str, graph: dict[str, Halted]) -> bool:
    return any(other == reader_of(stream) for stream in reach(call, graph) for other in graph[stream].waits_for)


def _first_of(made_here: Collection[str], call: str, dead: dict[str, Halted]) -> str:
    """Of the calls made here that are in one circle with this one; empty if it is in none."""
    others = reach(call, dead, beyond=True)
    return min(other for other in others if other in made_here) if call in others else ""


def in_words(call: str, dead: dict[str, Halted]) -> str:
    """The shortest circle through a call."""
    path = {other: [call] for other in dead[call].waits_for if other in dead}
    queue = list(path)
    for other in queue:
        if other == call:
            break
        for further in dead[other].waits_for:
            if further in dead and further not in path:
                path[further] = [*path[other], other]
                queue.append(further)
    return " -> ".join(f"{dead[each].words} {_STATES[dead[each].is_in_line]}" for each in path.get(call, [call]))


def reach(call: str, graph: dict[str, Halted], *, beyond: bool = False) -> list[str]:
    """The halted calls that a call waits for, directly or not, the nearest first; before them itself or, if `beyond`
    only where the way leads back to it."""
    found = dict.fromkeys(_next(call, graph) if beyond else [call])
    queue = list(found)
    for each in queue:
        for other in _next(each, graph):
            if other not in found:
                found[other] = None
                queue.append(other)
    return queue


def _next(call: str, graph: dict[str, Halted]) -> Iterable[str]:
    return [other for other in graph[call].waits_for if other in graph]


_STATES = {True: "(in line)", False: "(waits)"}
