"""`--nnodes=1:4` on real agents that come, die, stop and freeze: for torchrun scripts, and for those that look."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster, Project
from unified.api.builder import DLJobBuilder
from unified.protocol.client_master import JobStatus
from unified.testing import LocalCluster, eventually

pytestmark = pytest.mark.processes

WITHIN_S = 100.0
QUICK = {
    "UNIFIED_GROW_SETTLE_S": "0.2",
    "UNIFIED_GROW_EVERY_S": "0.5",
    "UNIFIED_REPLACE_S": "0.5",
    "UNIFIED_CHANGE_S": "0.5",
}
TRAIN = """
import os, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, world = dist.get_rank(), dist.get_world_size()
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE NODE_RANK TORCHELASTIC_MAX_RESTARTS"
told = " ".join(os.environ[name] for name in names.split())
assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(rank), str(world)), told
step = 0
while True:
    flags = torch.tensor([1.0, float(Path("go").exists())])
    dist.all_reduce(flags)
    assert flags[0] == world
    step += 1
    if step == 1:
        with open("rounds", "a") as out:
            print("round", told, os.getpid(), file=out, flush=True)
    if flags[1] == world:
        break
    time.sleep(0.02)
dist.destroy_process_group()
"""
POLITE = """
import os, time
from pathlib import Path
import torch, torch.distributed as dist
import unified

dist.init_process_group("gloo")
worker = unified.current_worker()
told = []
worker.on_round_change(lambda notice: told.append((notice.kind, notice.reason)))
kept = Path("checkpoint")
step = int(kept.read_text()) if kept.exists() else 0
first = step
while True:
    flags = torch.tensor([float(Path("go").exists()), float(worker.should_checkpoint)])
    dist.all_reduce(flags)
    step += 1
    if flags[0] == dist.get_world_size():
        break
    if flags[1] == dist.get_world_size():
        if worker.actor_info.rank == 0:
            kept.write_text(str(step))
        while not told:
            time.sleep(0.01)
        with open("rounds", "a") as out:
            print("saved", step, *told[0], file=out, flush=True)
        worker.ready_for_round_change()
        time.sleep(600)
    time.sleep(0.02)
with open("rounds", "a") as out:
    print("done", worker.actor_info.rank, worker.actor_info.world_size, worker.round, first, len(told), file=out)
dist.destroy_process_group()
"""

LOOP = """
    import os, time
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from unified import current_worker
    from unified.elastic import ElasticState, elastic

    def run():
        folder = Path(current_worker().job_info.user_config.out)
        state = ElasticState(model=torch.nn.Linear(1, 1), total=0)

        @elastic(state)
        def train():
            with open(folder / "rounds", "a") as out:
                names = "RANK WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE".split()
                print("round", *(os.environ[name] for name in names), state.step, state.total, os.getpid(), file=out)
            while True:
                flags = torch.tensor([1, int((folder / "go").exists())])
                dist.all_reduce(flags)
                if flags[1] == flags[0]:
                    break
                state.total += 1
                state.commit()
                assert state.total == state.step
                time.sleep(0.02)
        train()
"""


class Bench:
    """A cluster to which agents come and from which they go, and a job that runs on whatever is there."""

    def __init__(self, folder: Path, cluster: LocalCluster) -> None:
        self.folder = folder
        self.cluster = cluster
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.job: subprocess.Popen[str] | None = None

    def begin(self, script: str, *flags: str) -> None:
        (self.folder / "train.py").write_text(script)
        command = [sys.executable, "-m", "unified", "run", *flags, "--max-restarts=3", "train.py"]
        env = {name: value for name, value in os.environ.items() if not name.startswith(("UNIFIED_", "PET_"))}
        self.job = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**env, "UNIFIED_MASTER": self.cluster.address},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def come(self, name: str) -> None:
        """An agent appears."""
        command = [sys.executable, "-m", "unified_agent", "--master", self.cluster.address, "--node-id", name]
        command += ["--state-dir", str(self.folder / name), "--devices", "2", "--die-with-parent", str(os.getpid())]
        env = {**os.environ, "UNIFIED_RUN_DIR": str(self.folder / "run" / name)}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.agents[name] = subprocess.Popen(command, env=env, stderr=log)

    def go(self, name: str, number: signal.Signals) -> None:
        """An agent is sent a signal that ends it."""
        agent = self.agents.pop(name)
        agent.send_signal(number)
        agent.wait(WITHIN_S)

    def lines(self, word: str) -> list[list[str]]:
        file = self.folder / "rounds"
        found = file.read_text().splitlines() if file.exists() else []
        return [line.split()[1:] for line in found if line.startswith(word)]

    def in_world_of(self, size: int, after: int = 0) -> list[list[str]]:
        """Wait for a round of so many, beyond the first `after` lines; return the lines of its ranks."""

        def found() -> list[list[str]]:
            lines = [line for line in self.lines("round ")[after:] if line[1] == str(size)][-size:]
            return lines if sorted(line[0] for line in lines) == [str(rank) for rank in range(size)] else []

        return eventually(found, timeout=WITHIN_S, message=f"no round of {size}")

    @property
    def num_lines(self) -> int:
        return len(self.lines("round "))

    def status(self) -> JobStatus:
        return self.cluster.status(self.cluster.jobs[-1].job_id)

    def finish(self) -> str:
        assert self.job is not None
        (self.folder / "go").touch()
        out, _ = self.job.communicate(timeout=WITHIN_S)
        assert self.job.returncode == 0, out
        return out

    def end(self) -> None:
        for agent in self.agents.values():
            agent.send_signal(signal.SIGCONT)
            agent.terminate()
        for agent in self.agents.values():
            agent.wait(WITHIN_S)
        if self.job is not None and self.job.poll() is None:
            self.job.kill()
            self.job.wait()
        if self.job is not None and self.job.stdout is not None:
            self.job.stdout.close()


@pytest.fixture
def bench(tmp_path: Path, local_cluster: Cluster) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**env: str) -> Bench:
        made.append(Bench(tmp_path, local_cluster(nodes=1, devices=2, env={**QUICK, **env})))
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.mark.slow
def test_an_unmodified_script_grows_and_shrinks_with_the_nodes(bench: Callable[..., Bench]) -> None:
    job = bench()
    job.begin(TRAIN, "--nnodes=1:4", "--nproc-per-node=2")
    first = job.in_world_of(2)
    assert sorted(line[:-1] for line in first) == [
        [str(rank), "2", str(rank), "2", "0", "1", "0", "3"] for rank in (0, 1)
    ]
    job.come("second")
    grown = sorted(job.in_world_of(4))
    assert [line[4:7] for line in grown] == [["0", "2", "0"], ["0", "2", "0"], ["1", "2", "1"], ["1", "2", "1"]]
    seen = job.num_lines
    job.go("second", signal.SIGKILL)
    job.in_world_of(2, after=seen)
    seen = job.num_lines
    job.come("third")
    job.in_world_of(4, after=seen)
    seen = job.num_lines
    job.go("third", signal.SIGTERM)
    job.in_world_of(2, after=seen)
    status = job.status()
    assert status.num_restarts <= 2, "growth counts as no restart of the job"
    assert [worker.num_failures for worker in status.workers] == [0] * 8
    job.finish()


@pytest.mark.slow
def test_a_node_that_leaves_and_comes_back_quickly_is_counted_by_the_master(bench: Callable[..., Bench]) -> None:
    job = bench(UNIFIED_REPLACE_S="20")
    job.begin(TRAIN, "--nnodes=1:2", "--nproc-per-node=1")
    job.in_world_of(1)
    job.come("second")
    job.in_world_of(2)
    for _ in range(2):
        seen = job.num_lines
        job.go("second", signal.SIGKILL)
        job.come("second")
        job.in_world_of(2, after=seen)
    names = [worker.incarnation for worker in job.status().workers]
    assert names[1] >= 2
    job.finish()


@pytest.mark.slow
def test_a_node_that_freezes_ends_its_round_long_before_the_collective_does(bench: Callable[..., Bench]) -> None:
    job = bench()
    job.begin(TRAIN, "--nnodes=1:2", "--nproc-per-node=1")
    job.in_world_of(1)
    job.come("second")
    job.in_world_of(2)
    frozen = [one.pid for one in job.status().workers if one.node == "second"] + [job.agents["second"].pid]
    assert len(frozen) == 2
    seen = job.num_lines
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    job.in_world_of(1, after=seen)
    job.go("second", signal.SIGKILL)
    job.finish()


@pytest.mark.slow
def test_a_script_that_looks_is_told_before_a_change_and_loses_no_step(bench: Callable[..., Bench]) -> None:
    job = bench(UNIFIED_CHANGE_S="600")
    job.begin(POLITE, "--nnodes=1:2", "--nproc-per-node=1")
    eventually(lambda: len(job.cluster.jobs) == 1 and job.status().stage == "RUNNING", timeout=WITHIN_S)
    job.come("second")
    saved = eventually(lambda: job.lines("saved "), timeout=WITHIN_S, message="nobody was told")[0]
    assert saved[1] == "planned"
    assert re.fullmatch(r"the next round of role \w+ has 2 nodes instead of 1", " ".join(saved[2:]))
    eventually(lambda: [one.pid for one in job.status().workers if one.state == "RUNNING"][1:], timeout=WITHIN_S)
    job.finish()
    done = sorted(job.lines("done "))
    assert done == [["0", "2", "2", saved[0], "0"], ["1", "2", "2", saved[0], "0"]]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_elastic_loop_keeps_its_process_while_nodes_come_and_go(
    bench: Callable[..., Bench], project: Project, how: signal.Signals
) -> None:
    project(loop_of_test=LOOP)
    job = bench(UNIFIED_CHANGE_S="600")
    role = DLJobBuilder().node_num(2).device_per_node(1).device_type("CPU").config({"out": str(job.folder)})
    handle = job.cluster.submit(role.train("loop_of_test.run").nnodes("1:2").nproc_per_node(1).build(), "loop")
    first = job.in_world_of(1)
    job.come("second")
    grown = sorted(job.in_world_of(2))
    assert [line[2:4] for line in grown] == [["0", "2"], ["1", "2"]]
    assert len({line[4] for line in grown}) == 1, "both go on from the same step"
    seen = job.num_lines
    job.go("second", how)
    shrunk = job.in_world_of(1, after=seen)
    assert first[0][-1] == grown[0][-1] == shrunk[0][-1], "the process stays"
    assert 0 < int(grown[0][4]) <= int(shrunk[0][4])
    (job.folder / "go").touch()
    assert handle.wait(timeout=WITHIN_S) == 0
    assert [worker.num_failures for worker in job.status().workers] == [0, 0]
    assert len(job.status().budgets) == (1 if how == signal.SIGKILL else 0), "a node that is lost is charged"
