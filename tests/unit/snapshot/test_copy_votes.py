"""Ranks that take, copy and store snapshots, in any order of events: the memory of each is bounded, and after the loss
of a node all ranks still have the newest snapshot in common of those that all partners had."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from unified.protocol.snapshots import (
    NO_STAMP,
    SettledCopies,
    SnapshotSeries,
    SnapshotStamp,
    encode_snapshot_message,
)
from unified.rounds.snapshot_agreement import RoundAgreement, RoundPlace
from unified.snapshot.core.agreement import CopyVotes
from unified.snapshot.core.inventory import (
    MAX_BUFFERS,
    MAX_COPIES,
    OverQuotaError,
    SnapshotBuffer,
    SnapshotInventory,
)

FIRST, SECOND, THIRD = (SnapshotStamp(1, step) for step in (1, 2, 3))


class RoundStore(dict[str, Any]):
    """A round's store, in one process."""

    def add(self, key: str, number: int) -> int:
        self[key] = int(self.get(key, 0)) + number
        return int(self[key])

    def set(self, key: str, value: bytes) -> None:
        self[key] = value

    def delete_key(self, key: str) -> bool:
        return self.pop(key, None) is not None

    def agreements(self, num_ranks: int) -> list[RoundAgreement]:
        places = [RoundPlace("r", 1, rank, num_ranks, lambda: self, 1.0) for rank in range(num_ranks)]  # type: ignore[arg-type,return-value]
        found = [RoundAgreement(place, 0) for place in places]
        self.set(found[0]._settled, encode_snapshot_message(SettledCopies()))
        return found


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_a_snapshot_is_the_floor_once_all_ranks_have_voted_for_it(num_ranks: int) -> None:
    store = RoundStore()
    ranks = store.agreements(num_ranks)
    for rank in ranks:
        assert ranks[0].settled() == SettledCopies()
        rank.vote(FIRST, True)
    assert {rank.settled() for rank in ranks} == {SettledCopies(newest=FIRST, floor=FIRST)}
    for rank in reversed(ranks):
        rank.vote(SECOND, rank is not ranks[-1])
    assert ranks[0].settled() == SettledCopies(newest=SECOND, floor=FIRST)
    for rank in ranks:
        rank.vote(THIRD, False)
    assert ranks[0].settled() == SettledCopies(newest=THIRD, floor=FIRST)
    assert len(store) == 1, "votes that have been counted are deleted"


def test_a_rank_that_is_ahead_makes_no_copies_until_the_others_have_voted() -> None:
    votes = CopyVotes()
    for stamp in (FIRST, SECOND):
        assert votes.has_room
        votes.begin_copy(stamp)
        votes.end_copy(stamp)
    assert (votes.pending, votes.has_room) == ([FIRST, SECOND], False)
    votes.begin_copy(THIRD)
    votes.end_copy(SECOND)
    assert (votes.last, votes.pending) == (THIRD, [FIRST, SECOND])
    votes.settle(SettledCopies(newest=FIRST, floor=FIRST))
    assert (votes.floor, votes.pending, votes.has_room) == (FIRST, [SECOND], True)


def test_a_copy_that_failed_is_not_kept() -> None:
    votes = CopyVotes(FIRST)
    votes.begin_copy(SECOND)
    votes.end_copy(FIRST)
    assert (votes.floor, votes.pending) == (FIRST, [])


@dataclass(eq=False)
class Rank:
    """One rank, as `Snapshots` of its worker and the server of its node know it."""

    rank: int
    inventory: SnapshotInventory
    partner: SnapshotInventory | None
    agreement: RoundAgreement
    votes: CopyVotes = field(default_factory=CopyVotes)
    done: int = 0
    """Snapshots that it has written."""
    writing: SnapshotBuffer | None = None
    is_copied: bool = False
    needed: list[SnapshotStamp] = field(default_factory=list)
    sending: SnapshotBuffer | None = None
    """Snapshot on its way to the partner."""
    storing: SnapshotBuffer | None = None
    """Snapshot on its way to storage."""
    confirmed: SnapshotStamp = NO_STAMP
    copies: set[int] = field(default_factory=set)
    """Steps that its partner had, as the rank knows."""

    @property
    def is_sent(self) -> bool:
        return self.sending is not None or self.storing is not None


class Ranks:
    """Ranks of some nodes, and the events that may be next.

    Args:
        per_node: ranks of each node.
        every: snapshots of which one is copied.
        stored: snapshots of which one is stored; 0: none.
        is_in_step: no rank begins a snapshot before all have written the last.
        may_fail: copies may fail.
        num_unreachable: the last nodes, which cannot be reached.
    """

    def __init__(
        self,
        per_node: list[int],
        every: int,
        *,
        stored: int = 0,
        is_in_step: bool = True,
        may_fail: bool = False,
        num_unreachable: int = 0,
    ) -> None:
        self.every, self.stored, self.is_in_step, self.may_fail = every, stored, is_in_step, may_fail
        self.inventories = [SnapshotInventory(1 << 40) for _ in per_node]
        nodes = [node for node, number in enumerate(per_node) for _ in range(number)]
        num_partners = len(per_node) - num_unreachable
        agreements = RoundStore().agreements(len(nodes))
        self.ranks = [
            Rank(
                rank,
                self.inventories[node],
                self.inventories[(node + 1) % num_partners] if node < num_partners else None,
                agreements[rank],
            )
            for rank, node in enumerate(nodes)
        ]
        self.pulling: list[tuple[SnapshotInventory, SnapshotBuffer, SnapshotStamp]] = []
        """Copies that a partner goes on reading though their ranks have given them up."""

    def series(self, rank: Rank) -> SnapshotSeries:
        return SnapshotSeries("job", "r", len(self.ranks), rank.rank)

    def events(self) -> Iterator[Callable[[], None]]:
        """Yield what may happen next."""
        for rank in self.ranks:
            if rank.writing is not None:
                yield partial(self.commit, rank)
            elif not self.is_in_step or rank.done == min(each.done for each in self.ranks):
                yield partial(self.begin, rank)
            if rank.sending is not None:
                yield partial(self.end_sending, rank, has_copy=True)
                if self.may_fail:
                    yield partial(self.end_sending, rank, has_copy=False)
            if rank.storing is not None:
                yield partial(self.end_storing, rank)
        for pull in self.pulling:
            yield partial(self.end_pulling, *pull, has_copy=True)
            yield partial(self.end_pulling, *pull, has_copy=False)

    def begin(self, rank: Rank) -> None:
        """Begin a snapshot, unless that has to wait: as `Snapshots._write` and `SnapshotServer._begin`."""
        step, votes = rank.done + 1, rank.votes
        is_copied = step % self.every == 0
        if (is_copied or self.is_stored(step)) and rank.is_sent:
            return
        if votes.pending:
            votes.settle(rank.agreement.settled())
        needed = [votes.floor, *votes.pending]
        buffer = rank.inventory.begin(self.series(rank), 1, needed)
        if buffer is None and rank.inventory.is_full(self.series(rank)):
            assert rank.is_sent, "it waits for nothing"
            return
        rank.needed = needed
        rank.writing = buffer or rank.inventory.add(self.series(rank), 1)
        if is_copied:
            votes.end_copy(votes.last if rank.partner is None else rank.confirmed)
        rank.is_copied = is_copied and votes.has_room
        if self.is_in_step:
            assert rank.is_copied == is_copied, "a rank in step is not ahead"

    def commit(self, rank: Rank) -> None:
        buffer, rank.writing, rank.done = rank.writing, None, rank.done + 1
        assert buffer is not None
        stamp = SnapshotStamp(1, rank.done)
        rank.inventory.commit(buffer, stamp, 1)
        if rank.is_copied and rank.partner is not None:
            self.offer(rank, rank.partner, buffer)
        elif rank.is_copied:
            rank.copies.add(rank.done)
        if self.is_stored(rank.done):
            rank.storing = buffer
            buffer.num_uses += 1
        if rank.done % self.every == 0:
            if rank.votes.last != NO_STAMP:
                rank.agreement.vote(rank.votes.last, rank.votes.last in rank.votes.pending)
            rank.votes.begin_copy(stamp)

    def is_stored(self, step: int) -> bool:
        return self.stored > 0 and step % self.stored == 0

    def offer(self, rank: Rank, partner: SnapshotInventory, buffer: SnapshotBuffer) -> None:
        series = self.series(rank)
        try:
            copy = partner.begin(series, 1, rank.needed, is_copy=True) or partner.add(series, 1, is_copy=True)
        except OverQuotaError:
            assert self.may_fail
            return
        copy.num_uses += 1
        self.pulling.append((partner, copy, buffer.stamp))
        rank.sending = buffer
        buffer.num_uses += 1

    def end_sending(self, rank: Rank, *, has_copy: bool) -> None:
        assert rank.sending is not None
        stamp = rank.sending.stamp
        rank.sending.num_uses -= 1
        rank.sending = None
        if has_copy:
            pull = next(
                (pull for pull in self.pulling if (pull[1].series, pull[2]) == (self.series(rank), stamp)), None
            )
            if pull is None:  # the partner has read it, or failed
                has_copy = any(each.stamp == stamp for each in self.copies(rank))
            else:
                self.end_pulling(*pull, has_copy=True)
        if has_copy:
            rank.confirmed = stamp
            rank.copies.add(stamp.step)

    def end_pulling(
        self, partner: SnapshotInventory, copy: SnapshotBuffer, stamp: SnapshotStamp, *, has_copy: bool
    ) -> None:
        self.pulling.remove((partner, copy, stamp))
        copy.num_uses -= 1
        if has_copy or not self.may_fail:
            partner.commit(copy, stamp, 1)
        else:
            copy.state = "free"

    def end_storing(self, rank: Rank) -> None:
        assert rank.storing is not None
        rank.storing.num_uses -= 1
        rank.storing = None

    def copies(self, rank: Rank) -> list[SnapshotBuffer]:
        return [] if rank.partner is None else rank.partner.of(self.series(rank), is_copy=True)

    def newest_common(self, dead: SnapshotInventory | None = None) -> int:
        """Return the newest step that every rank finds on a node that lives, or 0."""
        found = [
            {
                each.stamp.step
                for inventory in self.inventories
                if inventory is not dead
                for each in inventory.buffers.values()
                if each.is_ready and each.series.rank == rank.rank
            }
            for rank in self.ranks
        ]
        return max(set.intersection(*found), default=0)

    def check(self) -> None:
        """Fail unless what `docs/snapshots.md` promises holds."""
        most = 3 if self.is_in_step and self.every == 1 else MAX_BUFFERS
        assert max(len(rank.inventory.of(self.series(rank))) for rank in self.ranks) <= most
        assert max(len(self.copies(rank)) for rank in self.ranks) <= MAX_COPIES
        if self.is_in_step:
            assert self.newest_common() >= min(rank.done for rank in self.ranks)
        copied = max(set.intersection(*(rank.copies for rank in self.ranks)), default=0)
        assert self.newest_common() >= copied
        for inventory in self.inventories:
            if any(rank.partner is None and rank.inventory is inventory for rank in self.ranks):
                continue
            assert self.newest_common(inventory) >= copied

    def run(self, choices: list[int]) -> None:
        for choice in choices:
            events = list(self.events())
            events[choice % len(events)]()
            self.check()


class Drawn:
    """Strategies of `Ranks`."""

    nodes = st.lists(st.integers(1, 2), min_size=2, max_size=3)
    every = st.integers(1, 3)
    stored = st.integers(0, 3)
    choices = st.lists(st.integers(0, 719), min_size=120, max_size=240)


@settings(phases=[Phase.generate])  # to make the example of a failure shorter would take minutes
@given(Drawn.nodes, Drawn.every, Drawn.stored, st.booleans(), st.booleans(), Drawn.choices)
def test_whatever_happens_memory_is_bounded_and_no_rank_drops_what_all_may_go_back_to(
    nodes: list[int], every: int, stored: int, is_in_step: bool, may_fail: bool, choices: list[int]
) -> None:
    Ranks(nodes, every, stored=stored, is_in_step=is_in_step, may_fail=may_fail).run(choices)


@pytest.mark.parametrize("num_unreachable", [0, 1])
@pytest.mark.parametrize("stored", [0, 2])
@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("per_node", [[1, 1, 1], [2, 2, 2]])
def test_ranks_in_step_go_on_copying_and_have_at_most_the_buffers_of_the_docs(
    per_node: list[int], every: int, stored: int, num_unreachable: int
) -> None:
    chance = random.Random(f"{per_node} {every} {stored} {num_unreachable}")
    ranks = Ranks(per_node, every, stored=stored, num_unreachable=num_unreachable)
    ranks.run([chance.randrange(720) for _ in range(1500)])
    done = min(rank.done for rank in ranks.ranks)
    assert done > 20
    assert min(rank.votes.floor.step for rank in ranks.ranks) >= done - 3 * every, "the floor follows"


@pytest.mark.parametrize("every", [1, 2])
def test_ranks_that_do_not_meet_still_go_on_copying(every: int) -> None:
    chance = random.Random(every)
    ranks = Ranks([1, 1], every, is_in_step=False, may_fail=True)
    ranks.run([chance.randrange(720) for _ in range(3000)])
    assert min(rank.votes.floor.step for rank in ranks.ranks) > 20
