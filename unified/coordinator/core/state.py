"""A space: everything that is known of one job, or of scripts outside jobs, and the presence of its workers."""

from __future__ import annotations

from collections import deque

from unified.coordinator.core.dataset import DatasetState
from unified.coordinator.core.records import MAX_EVENTS, Barrier, Checkpoint, Presence, RegisteredWorker
from unified.core.lease import LeaseTable
from unified.core.timers import TimerTable, earliest
from unified.errors import RefusedError
from unified.protocol.coordinator import HeartbeatResponse


class CoordinatorTimers:
    def __init__(self) -> None:
        self.leases: LeaseTable[Presence] = LeaseTable(30.0)
        self.barriers: TimerTable[tuple[str, str]] = TimerTable()
        """Timers by space and barrier."""
        self.awaited: TimerTable[tuple[str, str, str]] = TimerTable()
        """Deadlines of members that were not heard yet, by space, dataset and member."""

    @property
    def next_deadline(self) -> float | None:
        return earliest(self.leases.next_check, self.barriers.next_deadline, self.awaited.next_deadline)


class Space:
    """State of one space. Other spaces do not see it."""

    def __init__(self, name: str, timers: CoordinatorTimers) -> None:
        self.name = name
        self.timers = timers
        self.present: dict[str, Presence] = {}
        """Workers that are registered and not lost."""
        self.rank_slots: dict[tuple[int, int], str] = {}
        """Id of the present worker by world size and rank."""
        self.gone: dict[str, RegisteredWorker] = {}
        """Workers that are no longer registered, in the order in which they went."""
        self.ids: dict[str, str] = {}
        """Id of the worker that registered last for each rank, by the rank's name in datasets. A worker that
        deregistered has no entry."""
        self.barriers: dict[str, Barrier] = {}
        """Barriers by id. Barriers without waiting workers are in the order of their last releases."""
        self.num_releases = 0
        self.datasets: dict[str, DatasetState] = {}
        self.checkpoints: dict[str, Checkpoint] = {}
        self.event_times: deque[float] = deque(maxlen=MAX_EVENTS)
        """Times of the last events of workers that were logged."""
        self._revision = 0
        self.alive = HeartbeatResponse(is_known=True, revision=0)
        self.unknown = HeartbeatResponse(is_known=False, revision=0)

    @property
    def is_empty(self) -> bool:
        """True if the space has nothing to remember."""
        known = self.present or self.gone or self.barriers or self.datasets or self.checkpoints
        return not (self._revision or known or self.event_times)

    def id_of(self, member: str) -> str:
        return self.ids.get(member, member)

    def member_of(self, worker_id: str) -> str:
        """Return the name of the rank of the worker with this id."""
        presence = self.present.get(worker_id)
        worker = presence.worker if presence is not None else self.gone.get(worker_id)
        return worker.member if worker is not None else worker_id

    @property
    def revision(self) -> int:
        """Number that grows with each change of the present workers, and of the members of a dataset."""
        return self._revision

    @revision.setter
    def revision(self, revision: int) -> None:
        self._revision = revision
        self.alive = HeartbeatResponse(is_known=True, revision=revision)
        self.unknown = HeartbeatResponse(is_known=False, revision=revision)


REPLACED = "has a newer incarnation, which registered after this one: this one should end."


def heard(space: Space, presence: Presence, now: float) -> None:
    """Renew the lease of a worker that was heard, by its `timeout_s`."""
    presence.seen_at = now
    space.timers.leases.renew(presence, now, lease_s=presence.worker.timeout_s)


def current(space: Space, worker_id: str, session: str) -> Presence:
    """Return this incarnation; RefusedError: it is not present."""
    presence = space.present.get(worker_id)
    if presence is None:
        raise absent(space, worker_id)
    if presence.session != session:
        raise replaced(worker_id)
    return presence


def check_session(space: Space, member: str, session: str) -> None:
    """Raise RefusedError for an incarnation that is over and asks about its own shards.

    A session that was never registered here is ignored: its worker is known by its id only.
    """
    worker_id = space.id_of(member)
    presence, gone = space.present.get(worker_id), space.gone.get(worker_id)
    if presence is not None:
        if session not in ("", presence.session):
            raise replaced(worker_id)
    elif gone is not None and session and session in (gone.info.session, *gone.past_sessions):
        raise absent(space, worker_id)


def replaced(worker_id: str) -> RefusedError:
    """Return the refusal of an incarnation that a newer one has replaced."""
    return RefusedError("replaced", f"worker {worker_id} {REPLACED}")


def absent(space: Space, worker_id: str) -> RefusedError:
    """Return the refusal of a worker that is not present."""
    gone = space.gone.get(worker_id)
    if gone is None:
        return RefusedError("unknown-worker", f"worker {worker_id} is not registered: register it first.")
    reason = f"worker {worker_id} is not registered any more, as {gone.reason}: register it again."
    return RefusedError("unknown-worker", reason)
