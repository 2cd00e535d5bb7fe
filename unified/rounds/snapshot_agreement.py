"""Agreement of a round's ranks, over the TCPStore of the round: rank 0 reads all reports, and decides for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from unified.protocol.snapshots import (
    RankReport,
    SettledCopies,
    SnapshotAgreement,
    SnapshotStamp,
    encode_snapshot_message,
    rank_report,
    settled_copies,
    snapshot_agreement,
)
from unified.rounds.meeting import RoundMeeting, RoundMember

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it without saying so


class RoundPlace(NamedTuple):
    role: str
    """Name of the group that agrees: the role, or a worker that restarts alone."""
    round: int
    rank: int
    world_size: int
    connect: Callable[[], Store] | None
    """Connects to the round's store; None: this rank agrees with nobody."""
    within_s: float
    """Longest wait for the other ranks."""


class RoundAgreement:
    """One agreement of all ranks of a round; each takes part once.

    Args:
        number: of the agreement in its round, from 0; the same on all ranks.
    """

    def __init__(self, place: RoundPlace, number: int) -> None:
        self._place = place
        self._prefix = f"unified/snapshot/{place.round}/{number}"
        self._store = place.connect() if place.connect is not None else None
        self._settled = f"{self._prefix}/settled"

    def reach(self, report: RankReport, decide: Callable[[list[RankReport]], SnapshotAgreement]) -> SnapshotAgreement:
        """Give this rank's report; return what rank 0 decided. RoundMeetingError: another rank does not come."""
        if self._store is None:
            return decide([report])
        meeting = self._meeting(self._store, "begin", "call restore(), or take their first snapshot")
        reports = [rank_report.decode(each) for each in meeting.gather(encode_snapshot_message(report))]
        if reports:
            self._store.set(self._settled, encode_snapshot_message(SettledCopies()))  # type: ignore[arg-type]  # as below
        decision = encode_snapshot_message(decide(reports)) if reports else None
        return snapshot_agreement.decode(meeting.conclude(decision))

    def wait_for_all(self) -> None:
        """Return once all ranks have called this. RoundMeetingError: another rank does not."""
        if self._store is not None:
            self._meeting(self._store, "end", "restore").wait_for_all()

    def vote(self, stamp: SnapshotStamp, has_copy: bool) -> None:
        """Vote on the next snapshot that all ranks have to copy. The last rank to vote publishes the result."""
        assert self._store is not None
        key, num_ranks = f"{self._prefix}/votes/{stamp.round}-{stamp.step}", self._place.world_size
        # One number counts both votes: those against it in units that all others together do not reach.
        num_without, num_copies = divmod(self._store.add(key, 1 if has_copy else -num_ranks - 1), num_ranks + 1)
        if num_copies - num_without == num_ranks:
            floor = stamp if num_copies == num_ranks else self.settled().floor
            result = encode_snapshot_message(SettledCopies(newest=stamp, floor=floor))
            self._store.set(self._settled, result)  # type: ignore[arg-type]  # the stubs know only text
            self._store.delete_key(key)  # this is answered after the result is there for all ranks

    def settled(self) -> SettledCopies:
        """Return the result of all votes so far."""
        assert self._store is not None
        return settled_copies.decode(self._store.get(self._settled))

    def _meeting(self, store: Store, name: str, purpose: str) -> RoundMeeting:
        place = self._place
        return RoundMeeting(
            store,
            f"{self._prefix}/{name}",
            RoundMember(place.round, place.rank, place.world_size),
            place.within_s,
            purpose,
            "All ranks of a role call restore(), or take their first snapshot, together; a longer comm_timeout_s gives "
            "them more time.",
        )
