"""Buffers of a snapshot server: what is kept, what is overwritten, the quota; and that a loss of a node costs no more
than a snapshot."""

import random

import pytest

from unified.protocol.snapshots import NO_STAMP, SnapshotSeries, SnapshotStamp
from unified.snapshot.core.inventory import OverQuotaError, SnapshotBuffer, SnapshotInventory

SERIES = SnapshotSeries("job-1", "trainer", 2, 0)


def write(
    inventory: SnapshotInventory,
    step: int,
    *,
    series: SnapshotSeries = SERIES,
    floor: int = -1,
    is_offered: bool = False,
    is_copy: bool = False,
    nbytes: int = 100,
) -> SnapshotBuffer:
    mark = SnapshotStamp(1, floor) if floor >= 0 else NO_STAMP
    buffer = inventory.begin(series, nbytes, mark, is_copy=is_copy) or inventory.add(series, nbytes, is_copy=is_copy)
    inventory.commit(buffer, SnapshotStamp(1, step), nbytes)
    buffer.is_offered = is_offered
    return buffer


def steps(inventory: SnapshotInventory, series: SnapshotSeries = SERIES, *, is_copy: bool = False) -> list[int]:
    return [each.stamp.step for each in inventory.of(series, is_copy=is_copy) if each.is_ready]


def test_two_buffers_do_without_partners() -> None:
    inventory = SnapshotInventory(1000)
    for step in range(1, 20):
        write(inventory, step)
    assert len(inventory.buffers) == 2
    assert steps(inventory) == [18, 19]


def test_what_is_half_written_is_no_snapshot_and_is_free_once_its_writer_is_gone() -> None:
    inventory = SnapshotInventory(1000)
    write(inventory, 1)
    torn = inventory.add(SERIES, 100)
    assert steps(inventory) == [1]
    inventory.abandon(SERIES)
    assert inventory.begin(SERIES, 100, NO_STAMP) is torn


def test_what_partners_may_not_have_yet_is_kept() -> None:
    inventory = SnapshotInventory(1000)
    write(inventory, 1, is_offered=True)
    write(inventory, 2, is_offered=True, floor=0)
    write(inventory, 3, is_offered=True, floor=1)
    assert steps(inventory) == [1, 2, 3]
    write(inventory, 4, is_offered=True, floor=2)
    assert steps(inventory) == [2, 3, 4]


def test_a_buffer_that_a_transfer_uses_is_left_alone() -> None:
    inventory = SnapshotInventory(1000)
    read = write(inventory, 1)
    read.num_uses = 1
    write(inventory, 2)
    write(inventory, 3)
    assert steps(inventory) == [1, 2, 3]
    inventory.drop_job("job-1")
    assert list(inventory.buffers.values()) == [read]


def test_a_state_that_grows_gets_larger_buffers_and_gives_the_small_ones_back() -> None:
    inventory = SnapshotInventory(1000)
    for step in range(1, 4):
        write(inventory, step)
    for step in range(4, 7):
        write(inventory, step, nbytes=300)
    assert [each.nbytes for each in inventory.buffers.values()] == [300, 300]


def test_the_quota_holds_and_jobs_that_nobody_runs_make_way() -> None:
    inventory = SnapshotInventory(250)
    inventory.attached["job-1"] = 1
    write(inventory, 1)
    write(inventory, 2)
    other = SnapshotSeries("job-2", "trainer", 2, 0)
    with pytest.raises(OverQuotaError, match="above the quota"):
        write(inventory, 1, series=other)
    assert steps(inventory) == [1, 2]
    inventory.attached["job-1"] = 0
    write(inventory, 1, series=other)
    assert (steps(inventory), steps(inventory, other)) == ([], [1])


def test_going_back_forgets_what_is_later_on_all_ranks() -> None:
    inventory = SnapshotInventory(1000)
    copies = SERIES._replace(rank=1)
    for step in (4, 5):
        write(inventory, step)
        write(inventory, step, series=copies, is_copy=True)
    inventory.go_back(SERIES, SnapshotStamp(1, 4), has_partner=True)
    assert (steps(inventory), steps(inventory, copies, is_copy=True)) == ([4], [4])
    write(inventory, 5, floor=4, is_offered=True)
    write(inventory, 6, floor=4, is_offered=True)
    assert steps(inventory) == [4, 5, 6]


def test_snapshots_of_a_world_of_another_size_go_with_the_second_of_the_new_one() -> None:
    inventory = SnapshotInventory(1000)
    old = SERIES._replace(world_size=4)
    write(inventory, 3, series=old)
    write(inventory, 4)
    assert steps(inventory, old) == [3]
    write(inventory, 5)
    assert steps(inventory, old) == []


def test_copies_of_ranks_that_have_another_partner_now_are_dropped() -> None:
    inventory = SnapshotInventory(1000)
    gone, here = SERIES._replace(rank=1), SERIES._replace(rank=2)
    write(inventory, 3, series=gone, is_copy=True)
    write(inventory, 9, series=here, is_copy=True)
    inventory.settle_floor(SERIES, SnapshotStamp(1, 8))
    assert (steps(inventory, gone, is_copy=True), steps(inventory, here, is_copy=True)) == ([], [9])


def test_the_newest_of_each_rank_is_persisted_first() -> None:
    inventory = SnapshotInventory(1000)
    other = SERIES._replace(rank=1)
    for step in (4, 5):
        write(inventory, step)
    for step in (3, 4):
        write(inventory, step, series=other)
    write(inventory, 5, series=other, is_copy=True)
    order = [(each.series.rank, each.stamp.step) for each in inventory.to_persist()]
    assert order == [(0, 5), (1, 4), (0, 4), (1, 3)]


class Ranks:
    """Ranks of some nodes that train in step, each node's copies with the next, and transfers that take their time."""

    def __init__(self, num_nodes: int, per_node: int, every: int, chance: random.Random) -> None:
        self.chance = chance
        self.every = every
        self.num_nodes = num_nodes
        self.ranks = range(num_nodes * per_node)
        self.node = [rank // per_node for rank in self.ranks]
        self.inventories = [SnapshotInventory(1 << 40) for _ in range(num_nodes)]
        self.done = [0] * len(self.ranks)
        """Snapshots that each rank has written."""
        self.writing: dict[int, SnapshotBuffer] = {}
        self.moving: dict[int, tuple[SnapshotBuffer, SnapshotBuffer, int]] = {}
        """Transfers by rank: from, to, step."""
        self.confirmed: dict[int, set[int]] = {}
        self.told = [0] * len(self.ranks)
        """Newest step that each rank knows its partner to have, and has counted."""
        self.floor = [0] * len(self.ranks)

    def series(self, rank: int) -> SnapshotSeries:
        return SnapshotSeries("job", "r", len(self.ranks), rank)

    def advance(self) -> None:
        """One event: a snapshot begins or ends, or a transfer ends."""
        rank = self.chance.choice(self.ranks)
        if rank in self.moving and self.chance.random() < 0.3:
            self.arrive(rank)
        elif rank in self.writing:
            self.finish(rank)
        elif self.done[rank] == min(self.done) and not self.lags(rank):
            self.begin(rank)

    def lags(self, rank: int) -> bool:
        """Nobody begins a snapshot before all have written the last; nor one to be sent while another is on its way."""
        return (self.done[rank] + 1) % self.every == 0 and rank in self.moving

    def begin(self, rank: int) -> None:
        inventory = self.inventories[self.node[rank]]
        floor = SnapshotStamp(1, self.floor[rank])
        self.writing[rank] = inventory.begin(self.series(rank), 1, floor) or inventory.add(self.series(rank), 1)
        for step, ranks in self.confirmed.items():
            if rank in ranks and len(ranks) == len(self.ranks):
                self.floor[rank] = max(self.floor[rank], step)

    def finish(self, rank: int) -> None:
        step = self.done[rank] = self.done[rank] + 1
        buffer = self.writing.pop(rank)
        self.inventories[self.node[rank]].commit(buffer, SnapshotStamp(1, step), 1)
        if step % self.every:
            return
        buffer.is_offered = True
        buffer.num_uses += 1
        other = self.inventories[(self.node[rank] + 1) % self.num_nodes]
        floor = SnapshotStamp(1, self.floor[rank])
        copy = other.begin(self.series(rank), 1, floor, is_copy=True) or other.add(self.series(rank), 1, is_copy=True)
        copy.num_uses += 1
        self.moving[rank] = (buffer, copy, step)

    def arrive(self, rank: int) -> None:
        source, copy, step = self.moving.pop(rank)
        source.num_uses -= 1
        copy.num_uses -= 1
        self.inventories[(self.node[rank] + 1) % self.num_nodes].commit(copy, SnapshotStamp(1, step), 1)
        self.confirmed.setdefault(step, set()).add(rank)

    def newest_common(self, dead: set[int]) -> int:
        """The newest step that every rank finds on a node that lives; 0: there is none."""
        found = [
            {
                each.stamp.step
                for node, inventory in enumerate(self.inventories)
                if node not in dead
                for each in inventory.buffers.values()
                if each.is_ready and each.series.rank == rank
            }
            for rank in self.ranks
        ]
        return max(set.intersection(*found), default=0)


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize(("num_nodes", "per_node"), [(2, 1), (2, 2), (3, 2)])
def test_whatever_moment_a_node_dies_at_all_ranks_have_a_snapshot_in_common(
    num_nodes: int, per_node: int, every: int
) -> None:
    for seed in range(8):
        ranks = Ranks(num_nodes, per_node, every, random.Random(f"{seed} {num_nodes} {per_node} {every}"))
        for _ in range(400):
            ranks.advance()
            everywhere = min(ranks.done)
            assert ranks.newest_common(set()) >= everywhere
            sent = max((step for step, who in ranks.confirmed.items() if len(who) == len(ranks.ranks)), default=0)
            for node in range(num_nodes):
                assert ranks.newest_common({node}) >= sent
        assert min(ranks.done) > 5
        own = max(len(one.of(ranks.series(rank))) for one in ranks.inventories for rank in ranks.ranks)
        assert own <= 4
