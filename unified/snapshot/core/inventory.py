"""The buffers of one snapshot server: which may be written next, which are kept, and the quota.

A snapshot that others may need is never overwritten. Ranks meet in collectives between two snapshots, so no rank begins
a snapshot before all have written the last: without partners, the newest of each rank is enough. With partners, all
partners have the snapshots up to the *floor*, and the rank also keeps those on their way. After the loss of a node, the
newest common snapshot of all ranks is the floor or later, and the other nodes still have it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from unified.protocol.snapshots import NO_STAMP, HeldSnapshot, SnapshotSeries, SnapshotStamp

NUM_PERSISTED = 2
"""Snapshots of each rank that are written to storage when the agent stops."""


class OverQuotaError(Exception):
    """A buffer would exceed the quota."""


@dataclass(eq=False)
class SnapshotBuffer:
    """One buffer in memory."""

    number: int
    series: SnapshotSeries
    nbytes: int
    is_copy: bool
    state: Literal["free", "writing", "ready"] = "free"
    stamp: SnapshotStamp = NO_STAMP
    length: int = 0
    is_offered: bool = False
    """True if the partner has the snapshot, or gets it."""
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
        """Yield all buffers of a series' role."""
        for buffer in list(self.buffers.values()):
            if buffer.series[:2] == series[:2]:
                yield buffer

    def held(self, series: SnapshotSeries) -> list[HeldSnapshot]:
        """Return the snapshots of a series' role."""
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
        for is_copy in (False, True):
            for each in self.of(series, is_copy=is_copy):
                if each.is_ready and each.stamp == stamp:
                    return each
        return None

    def begin(
        self, series: SnapshotSeries, nbytes: int, floor: SnapshotStamp, *, is_copy: bool = False
    ) -> SnapshotBuffer | None:
        """Return a buffer to write, cleared; None: another one has to be added."""
        buffers = self.of(series, is_copy=is_copy)
        kept = self._kept(buffers, floor)
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
            self._drop(each for each in self.of_role(buffer.series) if _is_of_another_size(each, buffer.series))

    def settle_floor(self, series: SnapshotSeries, floor: SnapshotStamp) -> None:
        """Drop copies of ranks that have newer copies elsewhere: all partners have the floor."""
        copies = [each for each in self.of_role(series) if each.is_copy]
        current = {each.series for each in copies if each.state == "writing" or each.stamp >= floor}
        self._drop(each for each in copies if each.series not in current)

    def go_back(self, series: SnapshotSeries, stamp: SnapshotStamp, *, has_partner: bool) -> None:
        """Clear the snapshots of a role that are later than the one that all ranks go back to.

        With partners, that snapshot counts as offered: all ranks have it, so it is the floor.
        """
        for buffer in self.of_role(series):
            if buffer.is_ready and buffer.stamp > stamp and not buffer.num_uses:
                self._clear(buffer)
        for buffer in self.of(series):
            if buffer.is_ready:
                buffer.is_offered = has_partner and buffer.stamp == stamp

    def abandon(self, series: SnapshotSeries) -> None:
        """Free the unfinished buffers of a series whose writer is gone."""
        for buffer in self.of(series):
            if buffer.state == "writing" and not buffer.num_uses:
                self._clear(buffer)

    def drop_job(self, job_id: str) -> None:
        """Drop all that belongs to a job."""
        self._drop(each for each in list(self.buffers.values()) if each.series.job_id == job_id)

    def has_job(self, job_id: str) -> bool:
        """Return True if there is a buffer of a job."""
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

    def _kept(self, buffers: list[SnapshotBuffer], floor: SnapshotStamp) -> set[int]:
        """Return the numbers of buffers that must not be written."""
        ready = [each for each in buffers if each.is_ready]
        kept = {ready[-1].number} if ready else set()
        kept |= {each.number for each in ready if each.stamp >= floor and (each.is_offered or each.is_copy)}
        return kept | {each.number for each in buffers if each.state == "writing" and each.num_uses}

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
        buffer.state, buffer.stamp, buffer.length = "free", NO_STAMP, 0
        buffer.is_offered = buffer.is_stored = False


def _is_of_another_size(buffer: SnapshotBuffer, series: SnapshotSeries) -> bool:
    return buffer.series.world_size != series.world_size and buffer.state != "writing"


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB"
