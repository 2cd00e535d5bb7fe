"""A space: everything that is known of one job, or of scripts outside any."""

from __future__ import annotations

from collections import deque

from unified.core.coordinator.dataset import Dataset
from unified.core.coordinator.records import MAX_TOLD, Barrier, Checkpoint, Presence, Worker
from unified.core.lease import LeaseTable
from unified.core.timers import TimerTable
from unified.protocol.coordinator import HeartbeatResponse


class Clocks:
    """What is awaited, in all spaces."""

    def __init__(self) -> None:
        self.leases: LeaseTable[Presence] = LeaseTable(30.0)
        self.barriers: TimerTable[tuple[str, str]] = TimerTable()
        """By space and barrier."""
        self.awaited: TimerTable[tuple[str, str, str]] = TimerTable()
        """Deadlines of members of which nothing was heard yet, by space, dataset and member."""

    @property
    def next_deadline(self) -> float | None:
        deadlines = [self.leases.next_check, self.barriers.next_deadline, self.awaited.next_deadline]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)


class Space:
    """Nothing in it is seen in another."""

    def __init__(self, name: str, clocks: Clocks) -> None:
        self.name = name
        self.clocks = clocks
        self.present: dict[str, Presence] = {}
        """Workers that are registered and not lost."""
        self.seats: dict[tuple[int, int], str] = {}
        """Of those: who has which rank of which world."""
        self.gone: dict[str, Worker] = {}
        """The others, those that went first first."""
        self.ids: dict[str, str] = {}
        """Id of the worker that registered last for each rank, by the name of the rank as datasets have it; a worker
        that left in order has no entry."""
        self.barriers: dict[str, Barrier] = {}
        """Those at which nobody waits in the order of their last releases."""
        self.num_releases = 0
        self.datasets: dict[str, Dataset] = {}
        self.checkpoints: dict[str, Checkpoint] = {}
        self.told_at: deque[float] = deque(maxlen=MAX_TOLD)
        """When workers told the last events that were kept."""
        self._revision = 0
        self.alive = HeartbeatResponse(is_known=True, revision=0)
        self.unknown = HeartbeatResponse(is_known=False, revision=0)

    @property
    def is_empty(self) -> bool:
        """Nothing was ever said in it that has to be remembered."""
        known = self.present or self.gone or self.barriers or self.datasets or self.checkpoints
        return not (self._revision or known or self.told_at)

    def id_of(self, member: str) -> str:
        """Return what the worker of this rank calls itself."""
        return self.ids.get(member, member)

    def member_of(self, worker_id: str) -> str:
        """The name of the rank of the worker that calls itself so."""
        presence = self.present.get(worker_id)
        worker = presence.worker if presence is not None else self.gone.get(worker_id)
        return worker.member if worker is not None else worker_id

    @property
    def revision(self) -> int:
        """Counts up with each change of who is there, and of which dataset is spread over whom."""
        return self._revision

    @revision.setter
    def revision(self, revision: int) -> None:
        self._revision = revision
        self.alive = HeartbeatResponse(is_known=True, revision=revision)
        self.unknown = HeartbeatResponse(is_known=False, revision=revision)
