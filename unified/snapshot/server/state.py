"""State of a snapshot server besides its buffers: connected workers, and jobs with snapshots."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field

from unified.protocol.snapshots import (
    NO_STAMP,
    AttachSeries,
    BeginSnapshot,
    HeldElsewhere,
    SnapshotSeries,
    SnapshotStamp,
    StorageTarget,
)

DONE_LINGER_S = 30.0
"""Time for which a job's snapshots are kept here after all its workers on this node have done their work."""


@dataclass(eq=False)
class WorkerConnection:
    socket: socket.socket
    attached: AttachSeries | None = None
    waiting: BeginSnapshot | None = None
    """Request that waits until the last snapshot has been sent on."""
    needed: list[SnapshotStamp] = field(default_factory=list)
    """Snapshots that the last `BeginSnapshot` named; they go to the partner with that snapshot."""
    is_done: bool = False
    listed: list[HeldElsewhere] = field(default_factory=list)
    """Answers so far of the `num_asked` nodes that may hold snapshots of the role."""
    num_asked: int = 0

    @property
    def series(self) -> SnapshotSeries:
        assert self.attached is not None
        return self.attached.series


@dataclass(eq=False)
class SentState:
    """State of the snapshots of one rank that are sent on, to its partner or to storage."""

    num_under_way: int = 0
    confirmed: SnapshotStamp = NO_STAMP
    complaint: str = ""


@dataclass(eq=False)
class JobState:
    """State of a job's snapshots here, besides the buffers."""

    unfinished: set[SnapshotSeries] = field(default_factory=set)
    """Series whose worker has left without reporting that its work was done."""
    drop_at: float | None = None
    """Time at which all is dropped, unless a worker comes."""
    sent: dict[SnapshotSeries, SentState] = field(default_factory=dict)
    targets: dict[SnapshotSeries, StorageTarget] = field(default_factory=dict)
    arriving: dict[tuple[SnapshotSeries, SnapshotStamp], list[WorkerConnection]] = field(default_factory=dict)
    """Workers that wait for a snapshot on its way here from another node, to be restored."""

    def come(self, series: SnapshotSeries) -> None:
        """Note that a worker has come: it replaces the last one, and the role's series of another world size."""
        self.drop_at = None
        self.unfinished = {
            each
            for each in self.unfinished
            if each[:2] != series[:2] or (each.world_size == series.world_size and each.rank != series.rank)
        }

    def leave(self, connection: WorkerConnection, linger_s: float, *, is_last: bool) -> None:
        """Note that a worker has left; `linger_s`: time to keep all after the last one, unless all work is done."""
        if not connection.is_done:
            self.unfinished.add(connection.series)
        if is_last:
            self.drop_at = time.monotonic() + (linger_s if self.unfinished else DONE_LINGER_S)
            self.unfinished.clear()
