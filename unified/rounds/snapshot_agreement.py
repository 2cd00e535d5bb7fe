"""Agreement of a round's ranks, over the TCPStore of the round: rank 0 reads all reports, and decides for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from unified.protocol.snapshots import (
    NO_STAMP,
    RankReport,
    SnapshotAgreement,
    SnapshotStamp,
    encode_snapshot_message,
    rank_report,
    snapshot_agreement,
)
from unified.rounds.meeting import RoundMeeting, RoundMember

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it without saying so


class RoundPlace(NamedTuple):
    """The round that a worker is in."""

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
        self._counted = NO_STAMP
        self._first: list[str] = []
        """Keys of the confirmed snapshots that this rank counted first, and has to delete."""

    def reach(self, report: RankReport, decide: Callable[[list[RankReport]], SnapshotAgreement]) -> SnapshotAgreement:
        """Give this rank's report; return what rank 0 decided. RoundMeetingError: another rank does not come."""
        if self._store is None:
            return decide([report])
        meeting = self._meeting(self._store, "begin", "call restore(), or take their first snapshot")
        reports = [rank_report.decode(each) for each in meeting.gather(encode_snapshot_message(report))]
        decision = encode_snapshot_message(decide(reports)) if reports else None
        return snapshot_agreement.decode(meeting.conclude(decision))

    def wait_for_all(self) -> None:
        """Return once all ranks have called this. RoundMeetingError: another rank does not."""
        if self._store is not None:
            self._meeting(self._store, "end", "restore").wait_for_all()

    def all_have(self, stamp: SnapshotStamp) -> bool:
        """Note that this rank's partner has a snapshot; return True if all ranks' partners have.

        The counts of older snapshots are then deleted: all ranks have noted this one, so no rank reads them again.
        """
        if self._store is None:
            return True
        key = f"{self._prefix}/confirmed/{stamp.round}-{stamp.step}"
        is_new, self._counted = stamp != self._counted, stamp
        num_ranks = self._store.add(key, 1 if is_new else 0)
        if is_new and num_ranks == 1:
            self._first.append(key)
        if num_ranks < self._place.world_size:
            return False
        for older in self._first:
            if older != key:
                self._store.delete_key(older)
        self._first = [each for each in self._first if each == key]
        return True

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
