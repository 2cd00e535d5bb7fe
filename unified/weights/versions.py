"""Which version of the weights is complete at one receiver, and what has come of those on their way.

Pure: no torch, no clock, no memory. Whoever receives asks it about everything that comes, keeps the tensors beside it,
and does as the answers say. A *session* is one attempt of one sender to deliver one version here: it begins, its
buckets come in any order, its sender commits it, and it ends in exactly one way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from unified.protocol.records import WorkerIncarnation
from unified.values import Value

MAX_OPEN = 2
"""Sessions at a time: their memory is a model each."""
MAX_REMEMBERED = 64
"""Sessions that are over, whose end can still be asked for."""


class Opening(Value, frozen=True, kw_only=True):
    """What a sender says before the first bucket."""

    session: str
    version: int
    num_buckets: int
    senders: tuple[WorkerIncarnation, ...]
    """Who will send buckets; the first answers for the session. It is over when one of them dies."""
    expires_at: float
    """Past this nobody sends any more."""
    force: bool = False
    """Take it though a newer version is there."""


class How(StrEnum):
    """How a session ended."""

    PUBLISHED = "published"
    """Complete, and now the newest version."""
    OVERTAKEN = "overtaken"
    """A newer version was complete first: as good as delivered."""
    DROPPED = "dropped"
    """It will never be complete."""
    UNKNOWN = "unknown"
    """Nobody ever began it here, in this life."""


class Ended(NamedTuple):
    """The end of a session: its tensors are the newest version, or to be let go."""

    session: str
    how: How
    version: int
    reason: str = ""


class Begun(NamedTuple):
    """The answer to an `Opening`."""

    refusal: str = ""
    """Why not; empty: buckets are welcome."""
    ended: list[Ended] = []


class Take(StrEnum):
    """What to do with a bucket."""

    STORE = "store"
    DUPLICATE = "duplicate"
    UNWANTED = "unwanted"
    """Of a session that is over or never began, or beyond its last bucket."""


class _Incoming:
    def __init__(self, opening: Opening) -> None:
        self.opening = opening
        self.taken: set[int] = set()
        self.stored: set[int] = set()
        self.is_committed = False

    @property
    def is_complete(self) -> bool:
        return self.is_committed and len(self.stored) == self.opening.num_buckets


class Assembly:
    """The versions of one receiver. Any call is answered in any state.

    Attributes:
        version: the newest complete one; 0: none yet.
    """

    def __init__(self) -> None:
        self.version = 0
        self._open: dict[str, _Incoming] = {}
        self._past: OrderedDict[str, Ended] = OrderedDict()
        self._over: dict[str, int] = {}
        """For each worker the newest of its lives that is over."""

    def begin(self, now: float, opening: Opening) -> Begun:
        """A sender wants to deliver a version. Saying it twice changes nothing."""
        if opening.session in self._open:
            return Begun()
        ended = self.expire(now)
        refusal = self._refusal(opening)
        if refusal:
            return Begun(refusal, ended)
        first = opening.senders[0].worker
        for incoming in [each for each in self._open.values() if each.opening.senders[0].worker == first]:
            ended.append(self._end(incoming, How.DROPPED, f"its sender began version {opening.version} instead"))
        self._open[opening.session] = _Incoming(opening)
        return Begun("", ended)

    def take(self, session: str, index: int) -> Take:
        """A bucket came. After STORE, say `stored` when its tensors are safe."""
        incoming = self._open.get(session)
        if incoming is None or not 0 <= index < incoming.opening.num_buckets:
            return Take.UNWANTED
        if index in incoming.taken:
            return Take.DUPLICATE
        incoming.taken.add(index)
        return Take.STORE

    def stored(self, session: str, index: int) -> list[Ended]:
        """The tensors of a taken bucket are safe."""
        incoming = self._open.get(session)
        if incoming is None or index not in incoming.taken:
            return []
        incoming.stored.add(index)
        return self._publish(incoming) if incoming.is_complete else []

    def commit(self, session: str) -> list[Ended]:
        """Its sender stands by it: publish it as soon as all its buckets are stored, in either order.

        Without this a bucket that was read from the sender's memory late, after the sender had given up and gone on to
        change the model, could complete a version.
        """
        incoming = self._open.get(session)
        if incoming is None:
            return []
        incoming.is_committed = True
        return self._publish(incoming) if incoming.is_complete else []

    def abort(self, session: str, reason: str) -> list[Ended]:
        """Give a session up; one that is over stays as it ended."""
        incoming = self._open.get(session)
        return [] if incoming is None else [self._end(incoming, How.DROPPED, reason)]

    def life_over(self, life: WorkerIncarnation, reason: str) -> list[Ended]:
        """A worker's life, and all before it, is over: so are the sessions to which it was to send."""
        if life.incarnation <= self._over.get(life.worker, -1):
            return []
        self._over[life.worker] = life.incarnation
        return [
            self._end(incoming, How.DROPPED, f"{life.worker}, which was sending it, died: {reason}")
            for incoming in list(self._open.values())
            if self._first_dead(incoming.opening.senders) is not None
        ]

    def expire(self, now: float) -> list[Ended]:
        """End the sessions whose time is up."""
        late = [incoming for incoming in self._open.values() if now >= incoming.opening.expires_at]
        return [self._end(incoming, How.DROPPED, "its time was up") for incoming in late]

    def outcome(self, session: str) -> Ended | None:
        """How a session ended; None while it is open."""
        if session in self._open:
            return None
        return self._past.get(session) or Ended(session, How.UNKNOWN, 0, "it never began here")

    def progress(self) -> str:
        """What is on its way, in words; empty: nothing."""
        return ", ".join(
            f"version {opening.version} from {opening.senders[0].worker} "
            f"({len(incoming.stored)} of {opening.num_buckets} buckets)"
            for incoming in self._open.values()
            for opening in [incoming.opening]
        )

    @property
    def open_sessions(self) -> list[str]:
        """Sessions whose tensors are worth keeping."""
        return list(self._open)

    def check(self) -> list[str]:
        """Invariants that do not hold; none, unless this file has a defect."""
        broken = []
        if len(self._open) > MAX_OPEN:
            broken.append(f"{len(self._open)} sessions are open")
        if self._open.keys() & self._past.keys():
            broken.append("a session is both open and over")
        for session, incoming in self._open.items():
            opening = incoming.opening
            if incoming.is_complete:
                broken.append(f"session {session} is complete and still open")
            if not incoming.stored <= incoming.taken <= set(range(opening.num_buckets)):
                broken.append(f"session {session} has stored what it never took")
            if opening.version < self.version and not opening.force:
                broken.append(f"session {session} goes on though version {self.version} overtook it")
            if self._first_dead(opening.senders) is not None:
                broken.append(f"session {session} goes on though its sender is dead")
        return broken

    def _refusal(self, opening: Opening) -> str:
        dead = self._first_dead(opening.senders)
        if dead is not None:
            return f"{dead.worker} was to send it, and its life {dead.incarnation} is over"
        if opening.session in self._past:
            return f"this attempt is over: {self._past[opening.session].reason or 'it was complete'}"
        if opening.version < 1:
            return "versions are numbered from 1"
        if opening.version < self.version and not opening.force:
            return f"version {self.version} is there already, and versions go up"
        first = opening.senders[0].worker
        rest = [each.opening for each in self._open.values() if each.opening.senders[0].worker != first]
        for other in rest:
            if other.version == opening.version:
                return f"the same version is on its way from {other.senders[0].worker}"
        if len(rest) >= MAX_OPEN:
            return f"no more than {MAX_OPEN} are received at a time, and there are: {self.progress()}"
        return ""

    def _first_dead(self, senders: Iterable[WorkerIncarnation]) -> WorkerIncarnation | None:
        return next((life for life in senders if life.incarnation <= self._over.get(life.worker, -1)), None)

    def _publish(self, incoming: _Incoming) -> list[Ended]:
        version = self.version = incoming.opening.version
        ended = [self._end(incoming, How.PUBLISHED, "")]
        slower = [each for each in self._open.values() if each.opening.version < version and not each.opening.force]
        return ended + [self._end(each, How.OVERTAKEN, f"version {version} was complete first") for each in slower]

    def _end(self, incoming: _Incoming, how: How, reason: str) -> Ended:
        opening = incoming.opening
        del self._open[opening.session]
        ended = self._past[opening.session] = Ended(opening.session, how, opening.version, reason)
        while len(self._past) > MAX_REMEMBERED:
            self._past.popitem(last=False)
        return ended
