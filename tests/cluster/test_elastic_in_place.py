"""Elastic loops on real clusters: healthy ranks keep their process and model when a peer dies, and nothing is lost."""

import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Cluster, Project, lines
from unified.api.builder import DLJobBuilder
from unified.cli.main import main
from unified.client.handle import JobHandle
from unified.protocol.client_master import Explain, Story
from unified.testing import LocalCluster, eventually

pytestmark = pytest.mark.processes
STEPS = 120

TRAIN = """
    import os, time
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from unified import current_worker
    from unified.elastic import ElasticSampler, ElasticState, elastic

    DATA = torch.Generator().manual_seed(1)
    X = torch.randn(512, 8, generator=DATA)
    Y = X @ torch.randn(8, 1, generator=DATA)

    class Fuse:
        # Ends its process at one point of the work of an elastic state.
        def __init__(self, points):
            self.points, self.is_giving = points, False

        def at(self, point):
            if point == self.points.get(f"{os.environ['RANK']}.{current_worker().incarnation}") and self.is_armed():
                os.kill(os.getpid(), 9)

        def is_armed(self):
            return current_worker().incarnation > 0 or self.state.step >= 20

        def on_commit(self):
            self.at("commit")

        def state_dict(self):
            self.at("give" if self.is_giving else "keep")
            self.is_giving = False
            return {}

        def load_state_dict(self, state):
            self.at("take")
            self.is_giving = True  # mostly: a rank that has rolled back gives next what it has

    def build(config):
        torch.manual_seed(7)
        model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.1),
                                    torch.nn.Linear(64, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=200)
        sampler = ElasticSampler(len(X), 8, seed=3)
        fuse = Fuse(config.get("fuse", {}))
        fuse.state = ElasticState(model=model, optimizer=optimizer, schedule=schedule, sampler=sampler, seen=0,
                                  fuse=fuse, snapshot_every=config.get("snapshot_every", 0))
        return fuse.state

    def run():
        config = current_worker().job_info.user_config
        torch.set_num_threads(1)
        if config.get("storage"):
            current_worker().snapshots.configure(storage=config.storage, storage_every=1)
        state = build(config)
        incarnation = current_worker().incarnation

        @elastic(state)
        def train():
            rank = dist.get_rank()
            memory = next(state.model.parameters()).data_ptr()
            with open(f"{config.out}/rounds", "a") as file:
                print(rank, os.getpid(), memory, current_worker().round, state.step, flush=True, file=file)
            model = DistributedDataParallel(state.model)
            while state.step < config.steps:
                for batch in state.sampler:
                    loss = torch.nn.functional.mse_loss(model(X[batch]), Y[batch])
                    loss.backward()
                    if config.get("fail") == rank and state.step == 20 and incarnation == 0:
                        raise ValueError("of the user's own")
                    state.optimizer.step()
                    state.fuse.at("step")
                    if config.get("meets_late"):
                        dist.all_reduce(torch.ones(1))
                    state.optimizer.zero_grad()
                    state.schedule.step()
                    state.seen += len(batch)
                    with open(f"{config.out}/{rank}", "a") as file:
                        print(os.getpid(), state.step + 1, f"{float(loss.detach()):.6f}", state.seen, file=file)
                    state.commit()
                    time.sleep(config.get("pause", 0.01))
                    if state.step == config.steps:
                        break
        train()
"""

SHARDED = """
    import os, time
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from unified import current_worker
    from unified.elastic import ElasticSampler, ElasticState, elastic
    from elastic_train import X, Y

    def run():
        config = current_worker().job_info.user_config
        torch.set_num_threads(1)
        state = ElasticState(snapshot_every=1, sampler=ElasticSampler(len(X), 8, seed=3), seen=0)

        @elastic(state)
        def train():
            rank = dist.get_rank()
            torch.manual_seed(7)
            model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
            fully_shard(model[0])
            fully_shard(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            state.register(model=model, optimizer=optimizer)
            with open(f"{config.out}/rounds", "a") as file:
                print(rank, os.getpid(), 0, current_worker().round, state.step, flush=True, file=file)
            while state.step < config.steps:
                for batch in state.sampler:
                    optimizer.zero_grad()
                    loss = torch.nn.functional.mse_loss(model(X[batch]), Y[batch])
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    state.seen += len(batch)
                    with open(f"{config.out}/{rank}", "a") as file:
                        print(os.getpid(), state.step + 1, f"{float(loss.detach()):.6f}", state.seen, file=file)
                    state.commit()
                    time.sleep(config.get("pause", 0.01))
                    if state.step == config.steps:
                        break
        train()
"""


def submit(
    cluster: LocalCluster, out: Path, *, nodes: int = 2, each: int = 1, entry: str = "elastic_train.run", **config: Any
) -> JobHandle:
    out.mkdir(exist_ok=True)
    builder = DLJobBuilder().node_num(nodes).device_per_node(each).device_type("CPU")
    builder.config({"out": str(out), "steps": STEPS, **config})
    builder.train(entry).nnodes(nodes).nproc_per_node(each).max_restart(5)
    handle: JobHandle = cluster.submit(builder.build(), f"job-{out.name}")
    return handle


def losses(out: Path, rank: int) -> dict[int, float]:
    """Loss of each step, as the last incarnation or round that took it saw it."""
    records = [line.split() for line in lines(out, str(rank))]
    assert all(int(seen) == 8 * int(step) for _, step, _, seen in records)  # plain values go back with the step
    return {int(step): float(loss) for _, step, loss, _ in records}


def pids(out: Path, rank: int) -> list[int]:
    return list(dict.fromkeys(int(line.split()[1]) for line in lines(out, "rounds") if line.split()[0] == str(rank)))


def reaches(out: Path, rank: int, step: int) -> None:
    eventually(lambda: max(losses(out, rank), default=0) >= step, timeout=100, message=f"rank {rank} at step {step}")


def kill(out: Path, rank: int) -> None:
    os.kill(pids(out, rank)[-1], signal.SIGKILL)


@pytest.fixture
def expected(local_cluster: Cluster, project: Project, tmp_path: Path) -> Callable[..., list[dict[int, float]]]:
    """The losses of each rank in a run that nobody disturbed."""
    project(elastic_train=TRAIN, elastic_sharded=SHARDED)

    def run(cluster: LocalCluster, *, nodes: int, each: int, **other: Any) -> list[dict[int, float]]:
        handle = submit(cluster, tmp_path / "quiet", pause=0, nodes=nodes, each=each, **other)
        assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())
        ranks = range(nodes * each)
        found = [losses(tmp_path / "quiet", rank) for rank in ranks]
        assert all(sorted(each) == list(range(1, STEPS + 1)) for each in found)
        return found

    return run


def given_up(handle: JobHandle) -> Counter[int]:
    """Incarnations of each rank that ended because Gloo lost an operation, which happens (docs/elastic.md)."""
    ranks = {worker.name: worker.rank for worker in handle.status().workers}
    events = handle.connection.ask(Explain(job=handle.job_id), Story).events
    lost = [event for event in events if event.event == "worker-failed" and "Gloo lost an operation" in event.reason]
    return Counter(ranks[event.worker] for event in lost)


def check_losses(out: Path, expected: list[dict[int, float]], replaced: Collection[int]) -> None:
    """Each rank has taken the steps of the quiet run. Where ranks were killed, one may have been hit within a step that
    others had made, and has taken that from them: it has not written it.
    """
    for rank, quiet in enumerate(expected):
        found = losses(out, rank)
        assert max(found) == STEPS
        assert len(found) >= STEPS - (2 if replaced else 0)
        for step, loss in found.items():
            assert loss == pytest.approx(quiet[step], abs=1e-4), f"step {step} of rank {rank}"


@pytest.mark.parametrize(
    ("nodes", "victims"),
    [
        pytest.param(1, [0], id="first-of-two"),
        pytest.param(2, [0], id="first", marks=pytest.mark.slow),
        pytest.param(2, [1, 2], id="two", marks=pytest.mark.slow),
        pytest.param(2, [3], id="last", marks=pytest.mark.slow),
    ],
)
def test_killed_ranks_cost_no_other_its_process(
    local_cluster: Cluster,
    expected: Callable[..., list[dict[int, float]]],
    tmp_path: Path,
    nodes: int,
    victims: list[int],
) -> None:
    cluster = local_cluster(nodes=nodes, devices=2)
    quiet = expected(cluster, nodes=nodes, each=2)
    out = tmp_path / "killed"
    handle = submit(cluster, out, nodes=nodes, each=2)
    for step in (30, 60):
        reaches(out, 0, step)
        for rank in victims:
            kill(out, rank)
    assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())
    lost = given_up(handle)
    check_losses(out, quiet, [*victims, *lost])
    for rank in range(2 * nodes):
        assert len(pids(out, rank)) == (3 if rank in victims else 1) + lost[rank]
    memory = {tuple(line.split()[1:3]) for line in lines(out, "rounds")}
    assert len(memory) == len({pid for pid, _ in memory})  # each process has had one model, in one place


@pytest.mark.slow
def test_options_of_snapshots_hold_for_those_who_stay_and_those_who_come(
    local_cluster: Cluster, project: Project, tmp_path: Path
) -> None:
    project(elastic_train=TRAIN)
    out, storage = tmp_path / "killed", tmp_path / "storage"
    handle = submit(local_cluster(nodes=2, devices=1), out, snapshot_every=10, storage=str(storage))
    reaches(out, 0, 20)
    kill(out, 0)  # which writes for all, as their states are the same
    assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())
    found = eventually(lambda: list(storage.rglob(f"*{STEPS - 10}.*.snapshot")), message="nothing was stored")
    assert [path.parent.name for path in found] == ["replicated"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fuse", "other"),
    [
        pytest.param({"1.0": "step"}, {}, id="between-step-and-commit"),
        pytest.param({"1.0": "commit"}, {}, id="as-a-commit-begins"),
        pytest.param({"1.0": "keep"}, {}, id="within-a-commit"),
        pytest.param({"0.0": "keep"}, {}, id="within-a-commit-of-the-first"),
        pytest.param({"1.0": "step"}, {"meets_late": True, "snapshot_every": 1}, id="all-between-step-and-commit"),
        pytest.param({"1.0": "step", "1.1": "take"}, {}, id="a-replacement-that-takes-the-state"),
        pytest.param({"1.0": "step", "0.0": "give"}, {}, id="the-rank-that-gives-it"),
    ],
)
def test_a_rank_killed_at_any_point_of_a_step_costs_no_step(
    local_cluster: Cluster,
    expected: Callable[..., list[dict[int, float]]],
    tmp_path: Path,
    fuse: dict[str, str],
    other: dict[str, Any],
) -> None:
    cluster = local_cluster(nodes=1, devices=3)
    quiet = expected(cluster, nodes=1, each=3)
    out = tmp_path / "killed"
    handle = submit(cluster, out, nodes=1, each=3, fuse=fuse, **other)
    assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())
    victims = {int(incarnation.split(".")[0]) for incarnation in fuse}
    lost = given_up(handle)
    check_losses(out, quiet, [*victims, *lost])
    deaths = [sum(int(incarnation.split(".")[0]) == rank for incarnation in fuse) + lost[rank] for rank in range(3)]
    incarnations = {worker.rank: worker.incarnation for worker in handle.status().workers}
    assert [incarnations[rank] for rank in range(3)] == deaths, "each was killed where it should be, and nobody else"


@pytest.mark.slow
def test_a_sharded_model_goes_on_from_the_last_snapshot(
    local_cluster: Cluster, expected: Callable[..., list[dict[int, float]]], tmp_path: Path
) -> None:
    cluster = local_cluster(nodes=2, devices=1)
    quiet = expected(cluster, nodes=2, each=1, entry="elastic_sharded.run")
    out = tmp_path / "killed"
    handle = submit(cluster, out, entry="elastic_sharded.run")
    for step in (30, 60):
        reaches(out, 0, step)
        kill(out, 1)
    assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())
    lost = given_up(handle)
    check_losses(out, quiet, [1, *lost])
    assert [len(pids(out, rank)) for rank in range(2)] == [1 + lost[0], 3 + lost[1]]
    for before, after in itertools.pairwise(int(line.split()[4]) for line in lines(out, "rounds") if line[0] == "0"):
        assert after > before >= 0
    taken = [int(line.split()[1]) for line in lines(out, "0")]
    assert len(taken) <= STEPS + 2  # at most one step again for each of two deaths


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim", [pytest.param(0, id="of-the-store"), pytest.param(1, id="other", marks=pytest.mark.slow)]
)
def test_ranks_whose_node_dies_are_replaced_beside_the_others(
    local_cluster: Cluster, expected: Callable[..., list[dict[int, float]]], tmp_path: Path, victim: int
) -> None:
    cluster = local_cluster(nodes=3, devices=1)
    quiet = expected(cluster, nodes=2, each=1)
    out = tmp_path / "killed"
    handle = submit(cluster, out, pause=0.05)
    reaches(out, 1, 20)
    node = next(worker.node for worker in handle.status().workers if worker.rank == victim)
    cluster.kill_agent(int(node.removeprefix("node-")) - 1)
    assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())
    lost = given_up(handle)
    check_losses(out, quiet, [victim, *lost])
    assert [len(pids(out, rank)) for rank in range(2)] == [1 + (rank == victim) + lost[rank] for rank in range(2)]


@pytest.mark.parametrize(
    ("how", "victim", "entry"),
    [
        pytest.param("agent", 1, "elastic_train.run", id="agent-stops", marks=pytest.mark.slow),
        pytest.param("drain", 0, "elastic_train.run", id="drained-with-the-store", marks=pytest.mark.slow),
        pytest.param("drain", 1, "elastic_sharded.run", id="sharded", marks=pytest.mark.slow),
    ],
)
def test_a_node_that_is_to_go_costs_no_step_and_nobody_else_its_process(
    local_cluster: Cluster,
    expected: Callable[..., list[dict[int, float]]],
    tmp_path: Path,
    how: str,
    victim: int,
    entry: str,
) -> None:
    cluster = local_cluster(nodes=3, devices=1)
    quiet = expected(cluster, nodes=2, each=1, entry=entry)
    out = tmp_path / "moved"
    handle = submit(cluster, out, entry=entry, pause=0.05)
    reaches(out, 1, 20)
    node = next(worker.node for worker in handle.status().workers if worker.rank == victim)
    if how == "agent":
        cluster.kill_agent(int(node.removeprefix("node-")) - 1, signal.SIGTERM)
    else:
        assert main(["drain", node, "--master", cluster.address]) == 0
    assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())
    check_losses(out, quiet, [])
    for rank in range(2):
        steps = [int(line.split()[1]) for line in lines(out, str(rank))]
        assert sorted(steps) == list(range(1, STEPS + 1)), "each is taken once"
    assert [len(pids(out, rank)) for rank in range(2)] == ([1, 2] if victim else [2, 1])
    assert handle.status().budgets == []
    assert max(int(line.split()[3]) for line in lines(out, "rounds")) == 2, "one change is one round"


@pytest.mark.slow
def test_an_error_of_the_loop_itself_is_raised(local_cluster: Cluster, project: Project, tmp_path: Path) -> None:
    project(elastic_train=TRAIN)
    out = tmp_path / "raises"
    handle = submit(local_cluster(nodes=2, devices=1), out, fail=1)
    assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())
    assert [len(pids(out, rank)) for rank in range(2)] == [1, 2]  # the rank that raised was started again
    assert "ValueError: of the user's own" in "\n".join(handle.logs())


@pytest.mark.slow
def test_a_plain_script_is_started_again(local_cluster: Cluster, project: Project, tmp_path: Path) -> None:
    project(elastic_train=TRAIN.replace("@elastic(state)", ""))
    out = tmp_path / "plain"
    handle = submit(local_cluster(nodes=2, devices=1), out)
    reaches(out, 0, 30)
    kill(out, 1)
    assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())
    assert [len(pids(out, rank)) for rank in range(2)] == [2, 2]
