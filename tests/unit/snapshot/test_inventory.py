"""Buffers of a snapshot server: what is kept, what is overwritten, the bound of each rank, the quota."""

import pytest

from unified.protocol.snapshots import SnapshotSeries, SnapshotStamp
from unified.snapshot.core.inventory import MAX_BUFFERS, MAX_COPIES, OverQuotaError, SnapshotBuffer, SnapshotInventory

SERIES = SnapshotSeries("job-1", "trainer", 2, 0)


def write(
    inventory: SnapshotInventory,
    step: int,
    *,
    series: SnapshotSeries = SERIES,
    needed: tuple[int, ...] = (),
    is_copy: bool = False,
    nbytes: int = 100,
) -> SnapshotBuffer:
    stamps = [SnapshotStamp(1, each) for each in needed]
    buffer = inventory.begin(series, nbytes, stamps, is_copy=is_copy) or inventory.add(series, nbytes, is_copy=is_copy)
    inventory.commit(buffer, SnapshotStamp(1, step), nbytes)
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
    assert inventory.begin(SERIES, 100) is torn


def test_what_other_ranks_may_go_back_to_is_kept() -> None:
    inventory = SnapshotInventory(1000)
    write(inventory, 1)
    write(inventory, 2, needed=(0, 1))
    write(inventory, 3, needed=(1, 2))
    assert steps(inventory) == [1, 2, 3]
    write(inventory, 4, needed=(2, 3))
    assert steps(inventory) == [2, 3, 4]


@pytest.mark.parametrize(("is_copy", "most"), [(False, MAX_BUFFERS), (True, MAX_COPIES)])
def test_the_number_of_buffers_is_bounded_and_what_is_needed_comes_before_the_newest(is_copy: bool, most: int) -> None:
    inventory = SnapshotInventory(1000)
    needed = tuple(range(1, most))
    for step in needed:
        write(inventory, step, needed=needed, is_copy=is_copy)
    for step in (7, 8, 9):
        write(inventory, step, needed=needed, is_copy=is_copy)
        assert steps(inventory, is_copy=is_copy) == [*needed, step]
    sent = inventory.of(SERIES, is_copy=is_copy)[-1]
    sent.num_uses = 1
    assert inventory.begin(SERIES, 100, [SnapshotStamp(1, step) for step in needed], is_copy=is_copy) is None
    assert inventory.is_full(SERIES, is_copy=is_copy)
    with pytest.raises(OverQuotaError, match="all buffers that rank 0 of role trainer may have here are in use"):
        inventory.add(SERIES, 100, is_copy=is_copy)
    sent.num_uses = 0
    write(inventory, 10, needed=needed, is_copy=is_copy)
    assert steps(inventory, is_copy=is_copy) == [*needed, 10]


def test_of_two_snapshots_of_one_step_one_is_kept() -> None:
    inventory = SnapshotInventory(1000)
    for step in (1, 1, 1, 2, 2, 2, 3):
        write(inventory, step, needed=(1, 2))
    assert len(inventory.buffers) <= MAX_BUFFERS
    assert {1, 2, 3} <= set(steps(inventory))


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
    inventory.go_back(SERIES, SnapshotStamp(1, 4))
    assert (steps(inventory), steps(inventory, copies, is_copy=True)) == ([4], [4])
    write(inventory, 5, needed=(4,))
    write(inventory, 6, needed=(4, 5))
    assert steps(inventory) == [4, 5, 6]


def test_snapshots_of_a_world_of_another_size_go_with_the_second_of_the_new_one() -> None:
    inventory = SnapshotInventory(1000)
    old = SERIES._replace(world_size=4)
    write(inventory, 3, series=old)
    write(inventory, 4)
    assert steps(inventory, old) == [3]
    write(inventory, 5)
    assert steps(inventory, old) == []


def test_what_ranks_left_here_that_run_or_have_copies_elsewhere_now_is_dropped() -> None:
    inventory = SnapshotInventory(1000)
    gone, moved, here = (SERIES._replace(rank=rank) for rank in (1, 2, 3))
    write(inventory, 3, series=gone, is_copy=True)
    write(inventory, 3, series=moved)
    write(inventory, 9, series=moved, is_copy=True)
    write(inventory, 9, series=here)
    inventory.settle_floor(SERIES, SnapshotStamp(1, 8))
    assert (steps(inventory, gone, is_copy=True), steps(inventory, moved)) == ([], [])
    assert (steps(inventory, moved, is_copy=True), steps(inventory, here)) == ([9], [9])


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
