"""Memory that snapshots take: real servers, and ranks that train in step with real workers' snapshots."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import pytest

from tests.io.snapshot.conftest import Nodes
from tests.support.runtime import ENTRY, launch_of
from tests.support.snapshots import SECRET, SnapshotNode, SnapshotRank, a_state
from unified.job.spec import JobSpec, RoleSpec
from unified.protocol.snapshots import token_of
from unified.rounds.rendezvous_store import RoundStores, connect
from unified.rounds.snapshot_agreement import RoundPlace
from unified.snapshot.worker.snapshots import Restored, Snapshots

pytestmark = pytest.mark.processes

NUMEL = 250_000
"""Numbers in a state: 1 MB."""


class TrainingRank:
    """A rank that calls `Snapshots` as a worker does."""

    def __init__(self, node: SnapshotNode, rank: int, stores: RoundStores, numel: int, **options: Any) -> None:
        self.node, self.rank, self.numel = node, rank, numel
        spec = JobSpec(name="job", roles=[RoleSpec(name="trainer", kind="elastic", entry_point=ENTRY, total=2)])
        token = token_of(SECRET + node.node.encode(), "job-1")
        launch = launch_of(spec, 0, run_dir=str(node.run_dir), snapshot_token=token)
        connected = partial(connect, "127.0.0.1", stores.port, 100.0)
        self.snapshots = Snapshots(launch, lambda: RoundPlace("trainer", 1, rank, 2, connected, 100.0))
        self.snapshots.configure(**options)

    def take(self, step: int) -> None:
        self.snapshots.take(a_state(float(step), self.numel), step)

    def restore(self) -> Restored | None:
        return self.snapshots.restore()

    def close(self) -> None:
        assert self.snapshots._client is not None
        self.snapshots._client.close()


class Training:
    """Two ranks, each on a node of its own and the other's partner."""

    def __init__(self, ranks: list[TrainingRank], stores: RoundStores) -> None:
        self.ranks, self.stores = ranks, stores

    def restore(self) -> list[int]:
        """Have both ranks restore; return the steps."""
        with ThreadPoolExecutor() as pool:
            return [found.step for found in pool.map(TrainingRank.restore, self.ranks) if found is not None]

    def train(self, steps: range) -> None:
        """Train in step: rank 0 always comes first."""
        for step in steps:
            for rank in self.ranks:
                rank.take(step)

    def num_buffers(self) -> int:
        """Buffers of the node that has most: of its rank, and copies for the other."""
        return max(rank.node.num_buffers() for rank in self.ranks)


Begin = Callable[..., Training]


@pytest.fixture
def begin(snapshot_node: Nodes) -> Iterator[Begin]:
    """Factory of a training, with the quota and the size of the state of each rank."""
    with ExitStack() as stack:

        def start(
            quota_mb: tuple[int, int] = (256, 256), numel: tuple[int, int] = (NUMEL, NUMEL), **options: Any
        ) -> Training:
            stores = RoundStores("127.0.0.1", {})
            nodes = [snapshot_node(name, quota_mb=quota) for name, quota in zip("ab", quota_mb, strict=True)]
            ranks = [TrainingRank(node, rank, stores, numel[rank], **options) for rank, node in enumerate(nodes)]
            training = Training([stack.enter_context(closing(rank)) for rank in ranks], stores)
            assert training.restore() == []
            return training

        yield start


@pytest.mark.smoke
def test_the_quota_of_the_docs_is_enough_for_a_rank_that_always_comes_first(begin: Begin) -> None:
    training = begin(quota_mb=(6, 6))
    training.train(range(1, 31))
    assert training.num_buffers() <= 3 + 3
    assert training.restore() == [30, 30]


def test_a_second_snapshot_is_copied_in_four_buffers(begin: Begin) -> None:
    training = begin(quota_mb=(7, 7), partner_every=2)
    training.train(range(1, 31))
    assert training.num_buffers() <= 4 + 3
    assert training.restore() == [30, 30]


def test_a_rank_whose_copies_are_refused_costs_the_others_no_memory(begin: Begin) -> None:
    training = begin(quota_mb=(256, 5), numel=(6 * NUMEL, NUMEL))
    training.train(range(1, 16))
    assert training.num_buffers() <= 3 + 3
    assert training.restore() == [15, 15]


def test_a_rank_that_runs_ahead_is_bounded_until_the_others_have_come_as_far(
    begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    training = begin()
    first, second = training.ranks
    with caplog.at_level(logging.WARNING):
        for step in range(1, 13):
            first.take(step)
            assert training.num_buffers() <= 4
    assert (
        "event=snapshot-not-sent reason='rank 0 is ahead of others, or takes snapshots of other steps'" in caplog.text
    )
    for step in range(1, 13):
        second.take(step)
    training.train(range(13, 20))
    assert training.num_buffers() <= 4 + 3
    first.node.process.kill()
    attached = SnapshotRank(second.node, 1)
    assert {(0, 18), (0, 17)} <= set(attached.steps(is_copy=True))
    attached.client.close()
