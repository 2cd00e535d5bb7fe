"""The buffers of one snapshot server: which may be written next, which are kept, and the quota.

A snapshot that others may need is never overwritten. Ranks meet in collectives between two snapshots, so no rank begins
a snapshot before all have written the last: without partners, the newest of each rank is enough. With partners, rank
and partner also keep what `CopyVotes` names, so that all ranks have a snapshot in common after the loss of a node. The
number of buffers is bounded: beyond it a rank waits for a transfer to end, and a copy that is offered is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from unified.protocol.snapshots import NO_STAMP, HeldSnapshot, SnapshotSeries, SnapshotStamp

NUM_PERSISTED = 2
"""Snapshots of each rank that are written to storage when the agent stops."""
MAX_BUFFERS, MAX_COPIES = 4, 3
"""Most buffers of a rank, and most buffers of its partner for it."""


class OverQuotaError(Exception):
    """A buffer would exceed the quota."""


@dataclass(eq=False)
class SnapshotBuffer:
    number: int
    series: SnapshotSeries
    nbytes: int
    is_copy: bool
    state: Literal["free", "writing", "ready"] = "free"
    stamp: SnapshotStamp = NO_STAMP
    length: int = 0
    is_stored: bool = False
    """True if the snapshot is on storage, or on its way there."""
    num_uses: int = 0
    """Number of transfers that read or write the buffer."""

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"


class SnapshotInventory:
    """All buffers of a node."""

    def __init__(self, quota_bytes: int) -> None:
        self.quota_bytes = quota_bytes
        self.buffers: dict[int, SnapshotBuffer] = {}
        self.attached: Counter[str] = Counter()
        """Connections by job."""
        self._number = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def of(self, series: SnapshotSeries, *, is_copy: bool = False) -> list[SnapshotBuffer]:
        """Return the buffers of a series, the newest last."""
        found = [each for each in self.buffers.values() if each.series == series and each.is_copy == is_copy]
        return sorted(found, key=lambda each: (each.is_ready, each.stamp))

    def of_role(self, series: SnapshotSeries) -> Iterator[SnapshotBuffer]:
        for buffer in list(self.buffers.values()):
            if buffer.series[:2] == series[:2]:
                yield buffer

    def held(self, series: SnapshotSeries) -> list[HeldSnapshot]:
        return [
            HeldSnapshot(
                world_size=each.series.world_size,
                rank=each.series.rank,
                stamp=each.stamp,
                length=each.length,
                is_copy=each.is_copy,
            )
            for each in self.of_role(series)
            if each.is_ready
        ]

    def find(self, series: SnapshotSeries, stamp: SnapshotStamp) -> SnapshotBuffer | None:
        """Return the buffer of one snapshot, preferably the rank's own, not a copy."""
        same = (each for each in self.of_role(series) if each.is_ready and (each.series, each.stamp) == (series, stamp))
        return min(same, key=lambda each: each.is_copy, default=None)

    def is_full(self, series: SnapshotSeries, *, is_copy: bool = False) -> bool:
        return len(self.of(series, is_copy=is_copy)) >= (MAX_COPIES if is_copy else MAX_BUFFERS)

    def begin(
        self, series: SnapshotSeries, nbytes: int, needed: Collection[SnapshotStamp] = (), *, is_copy: bool = False
    ) -> SnapshotBuffer | None:
        """Return a buffer to write, cleared, or None if another one has to be added. The needed snapshots are kept, and
        the newest one if they leave room: else this rank is ahead of the others."""
        buffers = self.of(series, is_copy=is_copy)
        by_stamp = {each.stamp: each.number for each in buffers if each.is_ready}
        kept = {number for stamp, number in by_stamp.items() if stamp in needed}
        if by_stamp and len(kept) < (MAX_COPIES if is_copy else MAX_BUFFERS) - 1:
            kept.add(by_stamp[max(by_stamp)])
        free = [each for each in buffers if each.number not in kept and not each.num_uses]
        fitting = [each for each in free if each.nbytes >= nbytes]
        if not fitting:
            for each in free:  # the state has grown: these are too small
                del self.buffers[each.number]
            return None
        chosen = fitting[0]
        self._clear(chosen)
        chosen.state = "writing"
        return chosen

    def add(self, series: SnapshotSeries, nbytes: int, *, is_copy: bool = False) -> SnapshotBuffer:
        """Add a buffer to be written. OverQuotaError: no room, even without jobs that have no worker here."""
        if self.is_full(series, is_copy=is_copy):
            raise OverQuotaError(f"all buffers that rank {series.rank} of role {series.role} may have here are in use")
        self._make_room(nbytes, series.job_id)
        self._number += 1
        buffer = SnapshotBuffer(self._number, series, nbytes, is_copy, state="writing")
        self.buffers[buffer.number] = buffer
        return buffer

    def commit(self, buffer: SnapshotBuffer, stamp: SnapshotStamp, length: int) -> None:
        """Note that a buffer holds a whole snapshot, and drop obsolete snapshots of the role."""
        buffer.stamp, buffer.length, buffer.state = stamp, length, "ready"
        if not buffer.is_copy and sum(each.is_ready for each in self.of(buffer.series)) > 1:
            # All ranks have written the last snapshot, so those of rounds of another size are no longer needed.
            others = (each for each in self.of_role(buffer.series) if each.state != "writing")
            self._drop(each for each in others if each.series.world_size != buffer.series.world_size)

    def settle_floor(self, series: SnapshotSeries, floor: SnapshotStamp) -> None:
        """Drop what is left of ranks that run, or have their copies, elsewhere now: all ranks there have the floor."""
        found = list(self.of_role(series))
        current = {(each.series, each.is_copy) for each in found if each.state == "writing" or each.stamp >= floor}
        self._drop(each for each in found if (each.series, each.is_copy) not in current)

    def go_back(self, series: SnapshotSeries, stamp: SnapshotStamp) -> None:
        """Clear the snapshots of a role that are later than the one that all ranks go back to."""
        for buffer in self.of_role(series):
            if buffer.is_ready and buffer.stamp > stamp and not buffer.num_uses:
                self._clear(buffer)

    def abandon(self, series: SnapshotSeries) -> None:
        """Free the unfinished buffers of a series whose writer is gone."""
        for buffer in self.of(series):
            if buffer.state == "writing" and not buffer.num_uses:
                self._clear(buffer)

    def drop_job(self, job_id: str) -> None:
        self._drop(each for each in list(self.buffers.values()) if each.series.job_id == job_id)

    def has_job(self, job_id: str) -> bool:
        return any(buffer.series.job_id == job_id for buffer in self.buffers.values())

    def to_persist(self) -> list[SnapshotBuffer]:
        """Return the snapshots that storage does not have: the newest of every rank, then the one before of every rank.
        All ranks have the latter in common if one was killed before it had written its newest."""
        own = [each for each in self.buffers.values() if each.is_ready and not each.is_copy]
        ages: Counter[SnapshotSeries] = Counter()
        order: list[tuple[int, SnapshotBuffer]] = []
        for buffer in sorted(own, key=lambda each: each.stamp, reverse=True):
            order.append((ages[buffer.series], buffer))
            ages[buffer.series] += 1
        order.sort(key=lambda each: each[0])
        return [buffer for age, buffer in order if age < NUM_PERSISTED and not buffer.is_stored]

    def _make_room(self, nbytes: int, job_id: str) -> None:
        """Evict jobs that have no worker here, the earliest writer first, until there is room."""
        for other in dict.fromkeys(buffer.series.job_id for buffer in self.buffers.values()):
            if self.nbytes + nbytes <= self.quota_bytes:
                return
            if other != job_id and not self.attached[other]:
                self.drop_job(other)
        if self.nbytes + nbytes > self.quota_bytes:
            raise OverQuotaError(
                f"{_mib(nbytes)} more would be above the quota of this node's snapshots: {_mib(self.nbytes)} of "
                f"{_mib(self.quota_bytes)} are in use"
            )

    def _drop(self, buffers: Iterator[SnapshotBuffer]) -> None:
        for buffer in list(buffers):
            if not buffer.num_uses:
                self.buffers.pop(buffer.number, None)

    def _clear(self, buffer: SnapshotBuffer) -> None:
        buffer.state, buffer.stamp, buffer.length, buffer.is_stored = "free", NO_STAMP, 0, False


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB"
