"""State of a snapshot server beside its buffers: the workers that are connected, and the jobs that have snapshots."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field

from unified.protocol.snapshots import (
    NO_STAMP,
    AttachSeries,
    BeginSnapshot,
    SnapshotSeries,
    SnapshotStamp,
    StorageTarget,
)

DONE_LINGER_S = 30.0
"""Time for which the snapshots of a job are kept here whose workers on this node have all done their work."""


@dataclass(eq=False)
class WorkerConnection:
    """The connection of one worker."""

    socket: socket.socket
    attached: AttachSeries | None = None
    waiting: BeginSnapshot | None = None
    """Request that waits until the last snapshot has been sent on."""
    is_done: bool = False

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
    """State of a job's snapshots here, beside the buffers."""

    unfinished: set[SnapshotSeries] = field(default_factory=set)
    """Series whose worker has left and has not said that it had done its work."""
    drop_at: float | None = None
    """Time at which all is dropped, unless a worker comes."""
    sent: dict[SnapshotSeries, SentState] = field(default_factory=dict)
    targets: dict[SnapshotSeries, StorageTarget] = field(default_factory=dict)
    arriving: dict[tuple[SnapshotSeries, SnapshotStamp], list[WorkerConnection]] = field(default_factory=dict)
    """Workers that wait for a snapshot on its way here from another node, to be restored."""

    def come(self, series: SnapshotSeries) -> None:
        """Note that a worker has come, which replaces the one before it, and the role's rounds of another size."""
        self.drop_at = None
        self.unfinished = {
            each
            for each in self.unfinished
            if each[:2] != series[:2] or (each.world_size == series.world_size and each.rank != series.rank)
        }

    def leave(self, connection: WorkerConnection, linger_s: float, *, is_last: bool) -> None:
        """Note that a worker has left; `linger_s`: time to keep all after the last, unless all have done their work."""
        if not connection.is_done:
            self.unfinished.add(connection.series)
        if is_last:
            self.drop_at = time.monotonic() + (linger_s if self.unfinished else DONE_LINGER_S)
            self.unfinished.clear()
