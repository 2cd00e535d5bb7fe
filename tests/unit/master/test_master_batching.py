"""What a large cluster does in batches: the first of a burst at once, the others together."""

from __future__ import annotations

import pytest

from tests.support.master import Bench, simple
from tests.support.sim.sim_agent import SimAgent, resources
from tests.support.sim.world import World
from unified.job.spec import JobSpec
from unified.protocol.agent_master import DirectoryChanged
from unified.protocol.client_master import SubmitJob
from unified.protocol.records import Reachability
from unified_master.core import step


def test_a_large_cluster_is_told_news_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_master.core.step.BATCH_FROM", 2)
    bench = Bench(simple("s", 4, is_driver=False), simple("d"), nodes=2, failover_exec=2)
    told: list[dict[str, Reachability]] = []
    bench.world.watch = lambda _now, _who, what: told.extend(
        [{entry.worker: entry.state for entry in what.entries}] if isinstance(what, DirectoryChanged) else []
    )
    for rank in range(4):
        bench.end("s", rank, None)
    bench.world.run(0.1)
    nodes = {worker.node for worker in bench.job.workers.values()}
    assert [len(entries) for entries in told] == [1] * len(nodes) + [3] * len(nodes)
    assert all(state is Reachability.ENDED for entries in told for state in entries.values())


def test_a_large_cluster_schedules_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_master.core.step.BATCH_FROM", 1)
    world = World()
    world.add(SimAgent("n1", resources(devices=1)))
    world.run(0.01)
    for name in ("one", "two"):
        world.ask(SubmitJob(spec=JobSpec(name=name, roles=[simple()])))
    assert [world.job(name).is_placed for name in ("one", "two")] == [False, False]
    world.run(step.BATCH_S)
    assert [world.job(name).is_placed for name in ("one", "two")] == [True, True]
