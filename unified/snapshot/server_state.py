"""State of a snapshot server beside its buffers: the workers that are connected, and the jobs that have snapshots."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from unified.protocol.snapshots import (
    NO_STAMP,
    AttachSeries,
    BeginSnapshot,
    SnapshotSeries,
    SnapshotStamp,
    StorageTarget,
)


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

    all_done: bool = True
    """True if no worker that has left has not said that it had done its work."""
    drop_at: float | None = None
    """Time at which all is dropped, unless a worker comes."""
    sent: dict[SnapshotSeries, SentState] = field(default_factory=dict)
    targets: dict[SnapshotSeries, StorageTarget] = field(default_factory=dict)
