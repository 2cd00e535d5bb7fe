"""The versions of the weights at one receiver: the complete one, and those on their way.

Pure: no torch, no clock, no tensors. The receive service asks this module about every message, keeps the tensors, and
does as the answers say. A *session* is one attempt of one sender to deliver one version here. It begins, its buckets
come in any order, its sender commits it, and it ends in exactly one way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from unified.errors import (
    BusOverloadedError,
    RouteLostError,
    RpcCancelledError,
    RpcNotFoundError,
    RpcTimeoutError,
    WorkerDiedError,
)
from unified.protocol.records import WorkerIncarnation
from unified.weights.transfer_plan import TransferPlan

MAX_OPEN = 2
"""Number of sessions at a time, besides that of a member: each takes the memory of one model."""
MAX_REMEMBERED = 64
"""Number of ended sessions whose end can still be asked for."""


GONE, ENDED, LATE, FAILED, SUPERSEDED = "gone", "ended", "late", "failed", "superseded"
LOST = (GONE, ENDED)
"""Kinds of failures of a receiver that is not there; it gets the version from a member of its role when it is."""


class TransferFailure(NamedTuple):
    """The reason why one receiver did not get a version."""

    kind: str
    """`GONE`: its next incarnation, or the next attempt, may get it. `ENDED`: it has no next incarnation. `LATE`: time
    was up. `FAILED`: another try is useless. `SUPERSEDED`: it has a newer version, which is as good."""
    text: str


def failure_of(error: BaseException) -> TransferFailure:
    """Return the failure of the called worker that an error of a call means."""
    match error:
        case WorkerDiedError(is_final=is_final):
            return TransferFailure(ENDED if is_final else GONE, str(error))
        case RpcTimeoutError():
            return TransferFailure(LATE, str(error))
        case RpcCancelledError() | RouteLostError() | RpcNotFoundError() | BusOverloadedError():
            return TransferFailure(GONE, str(error))
        case _:
            return TransferFailure(FAILED, f"{type(error).__name__}: {error}")


class SyncReport(NamedTuple):
    """Report of a sync: the workers that have the version, and those that do not."""

    version: int
    receivers: tuple[str, ...]
    """Full names of the workers that have it; empty after a call with ``wait=False``."""
    left_out: dict[str, str]
    """The other workers of the group, and why each had no receiver. Each gets the newest version from a member of its
    role as soon as it has a receiver."""


class SessionOutcome(StrEnum):
    PUBLISHED = "published"
    """The version is complete, and now the newest."""
    SUPERSEDED = "superseded"
    """A newer version was complete first: as good as delivered."""
    DROPPED = "dropped"
    """The version will never be complete."""
    UNKNOWN = "unknown"
    """No sender began the session here, in this incarnation."""


class SessionEnd(NamedTuple):
    """The end of a session: its tensors are the newest version, or are to be dropped."""

    session: str
    how: SessionOutcome
    version: int
    reason: str = ""


class OfferReply(NamedTuple):
    """The answer to an offer."""

    refusal: str = ""
    """The reason of a refusal; empty: the offer is accepted."""
    ended: list[SessionEnd] = []


class BucketVerdict(StrEnum):
    STORE = "store"
    DUPLICATE = "duplicate"
    UNWANTED = "unwanted"
    """The session of the bucket is over or never began, or has no bucket of this index."""


class _Session:
    def __init__(self, plan: TransferPlan, expires_at: float) -> None:
        self.plan = plan
        self.expires_at = expires_at
        self.taken: set[int] = set()
        self.stored: set[int] = set()
        self.is_committed = False

    @property
    def is_complete(self) -> bool:
        return self.is_committed and len(self.stored) == len(self.plan.buckets)


class VersionTable:
    """The versions of one receiver. Any call is answered in any state.

    Attributes:
        version: the newest complete one; 0: none yet.
    """

    def __init__(self) -> None:
        self.version = 0
        self._open: dict[str, _Session] = {}
        self._past: OrderedDict[str, SessionEnd] = OrderedDict()
        self._over: dict[str, int] = {}
        """Newest dead incarnation, by worker."""

    def begin(self, now: float, plan: TransferPlan, expires_at: float) -> OfferReply:
        """Answer a sender that offers a version, until a time. A repeated offer changes nothing."""
        if plan.session in self._open:
            return OfferReply()
        ended = self.expire(now)
        refusal = self._refusal(plan)
        if refusal:
            return OfferReply(refusal, ended)
        first = plan.senders[0].worker
        instead = f"{first} began version {plan.version} instead"
        replaced = [each for each in self._open.values() if _is_replaced(each.plan, plan)]
        ended += [self._end(each, SessionOutcome.DROPPED, instead) for each in replaced]
        self._open[plan.session] = _Session(plan, expires_at)
        return OfferReply("", ended)

    def take(self, session: str, index: int) -> BucketVerdict:
        """Decide about a bucket that came. After STORE, call `stored` when its tensors are safe."""
        incoming = self._open.get(session)
        if incoming is None or not 0 <= index < len(incoming.plan.buckets):
            return BucketVerdict.UNWANTED
        if index in incoming.taken:
            return BucketVerdict.DUPLICATE
        incoming.taken.add(index)
        return BucketVerdict.STORE

    def stored(self, session: str, index: int) -> list[SessionEnd]:
        """Note that the tensors of a taken bucket are safe."""
        incoming = self._open.get(session)
        if incoming is None or index not in incoming.taken:
            return []
        incoming.stored.add(index)
        return self._publish(incoming) if incoming.is_complete else []

    def commit(self, session: str) -> list[SessionEnd]:
        """Note that the sender confirms a session; its version is published once all its buckets are stored as well.

        Without this step, a late bucket could complete a version after the sender gave up and changed the model, from
        whose memory the bucket is read.
        """
        incoming = self._open.get(session)
        if incoming is None:
            return []
        incoming.is_committed = True
        return self._publish(incoming) if incoming.is_complete else []

    def abort(self, session: str, reason: str) -> list[SessionEnd]:
        """Drop a session, unless it is over already."""
        incoming = self._open.get(session)
        return [] if incoming is None else [self._end(incoming, SessionOutcome.DROPPED, reason)]

    def incarnation_died(self, dead: WorkerIncarnation, reason: str) -> list[SessionEnd]:
        """Note that a worker's incarnation and all before it are dead; end the sessions in which they were to send."""
        if dead.number <= self._over.get(dead.worker, -1):
            return []
        self._over[dead.worker] = dead.number
        return [
            self._end(incoming, SessionOutcome.DROPPED, f"{dead.worker}, which was sending it, died: {reason}")
            for incoming in list(self._open.values())
            if self._first_dead(incoming.plan.senders) is not None
        ]

    def expire(self, now: float) -> list[SessionEnd]:
        late = [incoming for incoming in self._open.values() if now >= incoming.expires_at]
        return [self._end(incoming, SessionOutcome.DROPPED, "its time was up") for incoming in late]

    def outcome(self, session: str) -> SessionEnd | None:
        """Return the end of a session; None while it is open."""
        if session in self._open:
            return None
        return self._past.get(session) or SessionEnd(session, SessionOutcome.UNKNOWN, 0, "it never began here")

    def progress(self) -> str:
        """Return the versions on their way, in words; empty: none."""
        return ", ".join(
            f"version {plan.version} from {plan.senders[0].worker} "
            f"({len(incoming.stored)} of {len(plan.buckets)} buckets)"
            for incoming in self._open.values()
            for plan in [incoming.plan]
        )

    def is_coming(self, version: int) -> bool:
        """Return whether a version of at least this number is on its way."""
        return any(each.plan.version >= version for each in self._open.values())

    @property
    def open_sessions(self) -> list[str]:
        """The sessions whose tensors are worth keeping."""
        return list(self._open)

    def check(self) -> list[str]:
        """Return the invariants that do not hold; none, unless this file has a defect."""
        broken = []
        if sum(not each.plan.is_catch_up for each in self._open.values()) > MAX_OPEN:
            broken.append(f"{len(self._open)} sessions are open")
        if self._open.keys() & self._past.keys():
            broken.append("a session is both open and over")
        for session, incoming in self._open.items():
            plan = incoming.plan
            if incoming.is_complete:
                broken.append(f"session {session} is complete and still open")
            if not incoming.stored <= incoming.taken <= set(range(len(plan.buckets))):
                broken.append(f"session {session} has stored what it never took")
            if plan.version < self.version and not plan.force:
                broken.append(f"session {session} goes on though version {self.version} superseded it")
            if self._first_dead(plan.senders) is not None:
                broken.append(f"session {session} goes on though its sender is dead")
        return broken

    def _refusal(self, plan: TransferPlan) -> str:
        dead = self._first_dead(plan.senders)
        if dead is not None:
            return f"{dead.worker} should send it, but its incarnation {dead.number} is dead"
        if plan.session in self._past:
            return f"this attempt is over: {self._past[plan.session].reason or 'it was complete'}"
        if plan.version < 1:
            return "versions are numbered from 1"
        if plan.version < self.version and not plan.force:
            return f"version {self.version} is there already, and versions must increase"
        rest = [each.plan for each in self._open.values() if not _is_replaced(each.plan, plan)]
        for other in rest:
            if other.version == plan.version:
                return f"the same version is on its way from {other.senders[0].worker}"
        if not plan.is_catch_up and sum(not other.is_catch_up for other in rest) >= MAX_OPEN:
            return f"no more than {MAX_OPEN} are received at a time, and there are: {self.progress()}"
        return ""

    def _first_dead(self, senders: Iterable[WorkerIncarnation]) -> WorkerIncarnation | None:
        return next((sender for sender in senders if sender.number <= self._over.get(sender.worker, -1)), None)

    def _publish(self, incoming: _Session) -> list[SessionEnd]:
        version = self.version = incoming.plan.version
        ended = [self._end(incoming, SessionOutcome.PUBLISHED, "")]
        slower = [each for each in self._open.values() if each.plan.version < version and not each.plan.force]
        return ended + [
            self._end(each, SessionOutcome.SUPERSEDED, f"version {version} was complete first") for each in slower
        ]

    def _end(self, incoming: _Session, how: SessionOutcome, reason: str) -> SessionEnd:
        plan = incoming.plan
        del self._open[plan.session]
        ended = self._past[plan.session] = SessionEnd(plan.session, how, plan.version, reason)
        while len(self._past) > MAX_REMEMBERED:
            self._past.popitem(last=False)
        return ended


def _is_replaced(old: TransferPlan, new: TransferPlan) -> bool:
    """Return whether an open session ends because of a new plan, by its sender or of the version that it brings."""
    is_same_sender = old.senders[0].worker == new.senders[0].worker
    return is_same_sender or (old.is_catch_up and not new.is_catch_up and old.version == new.version)
