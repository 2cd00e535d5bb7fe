"""The order of rows: each once an epoch, the same after a resume, whatever the number of ranks; and the step count."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified.training.sampling import Position, ResumableSampler, TrainingPlan


def rows_of_step(plan: TrainingPlan, position: Position, num_passes: int) -> list[int]:
    """Rows of all ranks in the next forward passes from a position on, without those that come twice."""
    found: list[int] = []
    total = plan.rows_of(position.epoch)
    for rank in range(plan.world_size):
        sampler = ResumableSampler(plan.num_rows, rank=rank, world_size=plan.world_size, seed=3)
        sampler.set_position(position, total)
        rows = list(sampler)
        assert len(rows) == len(sampler)
        found += rows[: num_passes * plan.batch_size]
    return sorted(set(found))


plans = st.builds(
    TrainingPlan,
    num_rows=st.integers(1, 40),
    world_size=st.integers(1, 4),
    batch_size=st.integers(1, 5),
    accumulation=st.integers(1, 3),
    num_epochs=st.sampled_from([0.3, 1.0, 1.5, 2.0]),
    max_steps=st.just(0),
)


@given(plans)
def test_steps_are_as_many_as_were_said_from_any_position(plan: TrainingPlan) -> None:
    step, position = 0, Position()
    said = plan.total_steps(0, position)
    while rows := plan.rows_of(position.epoch):
        assert plan.total_steps(step, position) == said
        left = -(-(rows - position.row) // plan.world_size)
        passes = min(plan.accumulation, -(-left // plan.batch_size))
        position = plan.after(position, passes)
        step += 1
    assert step == said


@given(plans, st.integers(1, 4), st.integers(0, 3))
def test_each_row_comes_once_an_epoch_though_ranks_change(plan: TrainingPlan, ranks: int, passes: int) -> None:
    position = plan.after(Position(), passes)
    if position.epoch or plan.rows_of(0) < plan.num_rows:
        return
    before = rows_of_step(plan, Position(), passes)
    rest = rows_of_step(plan._replace(world_size=ranks), position, plan.num_rows)
    new_at_end = set(rest) - set(before)
    assert sorted({*before, *rest}) == list(range(plan.num_rows))
    assert len(new_at_end) == plan.num_rows - len(before)


def test_epochs_have_orders_of_their_own() -> None:
    sampler = ResumableSampler(50, rank=0, world_size=1, seed=1)
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_position(Position(epoch), 50)
        orders.append(list(sampler))
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(50))
    sampler.set_position(Position(0, 45), 50)
    assert list(sampler) == orders[0][45:]
    sampler.set_position(Position(0, 50), 50)
    assert list(sampler) == []


@pytest.mark.parametrize(("epochs", "steps", "total"), [(1.0, 0, 13), (2.0, 0, 26), (0.5, 0, 7), (1.0, 7, 7)])
def test_step_counts(epochs: float, steps: int, total: int) -> None:
    plan = TrainingPlan(num_rows=100, world_size=2, batch_size=4, accumulation=1, num_epochs=epochs, max_steps=steps)
    assert plan.total_steps(0, Position()) == total


@pytest.mark.parametrize("num_epochs", [0.3, 1.0, 2.5, 3.0])
@pytest.mark.parametrize(("epoch", "row"), [(0, 0), (0, 40), (1, 99), (2, 8), (5, 0)])
def test_the_number_of_steps_is_that_of_walking_through_them(num_epochs: float, epoch: int, row: int) -> None:
    plan = TrainingPlan(num_rows=100, world_size=2, batch_size=4, accumulation=3, num_epochs=num_epochs, max_steps=0)
    steps, position = 10, Position(epoch, row)
    while (rows := plan.rows_of(position.epoch)) > 0:
        if position.row < rows:
            steps += 1
            position = plan.after(position, 3)
        else:
            position = Position(position.epoch + 1)
    assert plan.total_steps(10, Position(epoch, row)) == steps


def test_very_many_epochs_are_counted_at_once() -> None:
    plan = TrainingPlan(num_rows=100, world_size=1, batch_size=1, accumulation=1, num_epochs=1e6, max_steps=0)
    assert plan.total_steps(0, Position()) == 100_000_000
