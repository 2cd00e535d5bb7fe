"""Process groups of elastic roles: up everywhere before any rank's code begins, and there while calls may use them."""

from pathlib import Path

import pytest

from benchmarks.launch import short_jobs
from tests.cluster.conftest import Cluster, Project
from unified.api.builder import DLJobBuilder

pytestmark = pytest.mark.processes


ACTOR = """
import atexit
import torch
import torch.distributed as dist
from unified import current_worker, rpc

destroy = dist.destroy_process_group

def destroy_and_say(*args):
    print("destroy", dist.is_initialized(), flush=True)
    destroy(*args)

class Actor:
    def __init__(self):
        dist.destroy_process_group = destroy_and_say
        current_worker().on_stop(lambda: print("on_stop", dist.is_initialized(), flush=True))
        atexit.register(lambda: print("atexit", dist.is_initialized(), flush=True))

    @rpc()
    def train(self):
        value = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(value)
        return value.item()

class Runner(Actor):
    def run(self):
        pass
"""

TRAINER = """
from unified import RoleGroup

def run():
    for role in ("actor", "runner"):
        for _ in range(3):
            assert RoleGroup(role).call("train").result() == [6.0] * 3
"""


@pytest.mark.slow
def test_a_role_that_answers_calls_keeps_its_group_until_the_job_stops_it(
    local_cluster: Cluster, project: Project
) -> None:
    project(actors=ACTOR, trainers=TRAINER)
    builder = DLJobBuilder().node_num(1).device_per_node(7).device_type("CPU")
    builder.role("actor").train("actors.Actor").total(3).per_group(3).not_driver()
    builder.role("runner").train("actors.Runner").total(3).per_group(3).not_driver()
    builder.workload("trainer", "trainers.run")
    handle = local_cluster(nodes=1, devices=7).submit(builder.build(), "rl")
    assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())
    for role in ("actor", "runner"):
        for rank in range(3):
            lines = [line.partition("] ")[2] for line in handle.logs(role=role, rank=rank)]
            assert lines == ["on_stop True", "atexit True", "destroy True"]


TORCHRUN_SCRIPT = """
import argparse, os
import torch
import torch.distributed as dist

def main(x):
    dist.init_process_group("gloo", init_method="env://")
    assert dist.get_rank() == int(os.environ["RANK"]) == int(os.environ["LOCAL_RANK"])
    assert dist.get_world_size() == int(os.environ["WORLD_SIZE"])
    value = torch.tensor([dist.get_rank() + float(x)])
    dist.all_reduce(value)
    dist.destroy_process_group()
    assert not dist.is_initialized()
    print("sum", value.item(), flush=True)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--x", type=int)
    main(parser.parse_args().x)
"""


@pytest.mark.parametrize("entry", ["own_trainer.py --x 1", "-m own_trainer --x 1"])
def test_a_script_that_is_its_own_trainer_runs_as_under_torchrun(
    local_cluster: Cluster, project: Project, tmp_path: Path, entry: str
) -> None:
    project(own_trainer=TORCHRUN_SCRIPT)
    job = DLJobBuilder().node_num(1).device_per_node(2).device_type("CPU").train(entry).total(2).per_group(2).build()
    handle = local_cluster(nodes=1, devices=2).submit(
        job, "own", job_max_restart=0, working_dir=str(tmp_path / "project")
    )
    assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())
    for rank in range(2):
        assert list(handle.logs(role="ELASTIC", rank=rank)) == [f"[ELASTIC-{rank}] sum 3.0"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("a_core", [0, 2], ids=["idle", "busy"])
def test_ranks_that_end_at_once_harm_no_other(local_cluster: Cluster, a_core: int) -> None:
    cluster = local_cluster(nodes=1, devices=short_jobs.RANKS)
    with short_jobs.busy_loops(a_core):
        for entry, jobs in (("nothing", 60), ("random_end", 20)):
            counts = short_jobs.run_jobs(cluster.address, entry, jobs, max_restart=0)
            assert counts.is_clean, counts
