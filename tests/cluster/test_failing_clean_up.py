"""Ranks that fail in the middle of a collective's round, and ranks that end before their peers: each is named."""

import json
from typing import Any

import pytest

from tests.cluster.conftest import Cluster, Project
from unified.api.builder import DLJobBuilder
from unified.cli.main import main
from unified.client.handle import JobHandle
from unified.protocol.client_master import Explain, Story
from unified.testing import LocalCluster, eventually

pytestmark = pytest.mark.processes

RANKS = """
import atexit, os, time
import torch
import torch.distributed as dist

def meet():
    dist.all_reduce(torch.ones(1))

class Meets:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        meet()

def fail():
    raise ValueError("boom")

def fails():
    meet()
    if dist.get_rank() == 0:
        time.sleep(600)
    if os.environ["HOW"] == "atexit":
        atexit.register(meet)
        fail()
    elif os.environ["HOW"] == "with":
        with Meets():
            fail()
    elif os.environ["HOW"] == "except":
        try:
            fail()
        except ValueError:
            meet()
    try:
        fail()
    finally:
        meet()

def ends():
    for step in range(29):
        meet()
    if dist.get_rank() == 0:
        meet()
"""

ANSWERS = """
from ranks import ends
from unified import rpc

class Answers:
    def run(self):
        ends()

    @rpc()
    def answer(self):
        pass
"""


def submit(cluster: LocalCluster, entry: str, how: str = "", **options: Any) -> JobHandle:
    builder = DLJobBuilder().node_num(1).device_per_node(2).device_type("CPU").global_env({"HOW": how})
    builder.train(entry).total(2).per_group(2).max_restart(0)
    return cluster.submit(builder.build(), "ranks", stop_grace_s=1, **options)


def story(handle: JobHandle) -> dict[str, str]:
    events = handle.connection.ask(Explain(job=handle.job_id), Story).events
    return {event.event: event.reason for event in events}


@pytest.mark.parametrize(
    "how", ["finally", pytest.param("with", marks=pytest.mark.slow), pytest.param("except", marks=pytest.mark.slow)]
)
def test_a_rank_that_fails_and_waits_in_its_clean_up_says_so(
    local_cluster: Cluster, project: Project, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    project(ranks=RANKS)
    cluster = local_cluster(nodes=1, devices=2)
    handle = submit(cluster, "ranks.fails", how)
    eventually(lambda: "worker-cleans-up" in story(handle), timeout=100)
    failed = "failed with ValueError: boom in fail, "
    assert story(handle)["worker-cleans-up"].startswith(failed)
    worker = next(worker for worker in handle.status().workers if worker.rank == 1 and worker.role != "store")
    assert worker.reason.startswith(failed)
    eventually(lambda: any("ValueError: boom" in line for line in handle.logs()))
    text = "\n".join(handle.logs())
    assert "this rank has been in all_reduce 2 for 2 s or more while it handles an exception" in text
    assert "Traceback (most recent call last)" in text
    capsys.readouterr()
    assert main(["stack", "ranks", "--master", cluster.address, "--json"]) == 0
    role = json.loads(capsys.readouterr().out)["roles"]["ELASTIC"]
    assert role["culprits"] == [worker.name]
    assert role["findings"][0].startswith(f"rank 1 {failed}")
    assert "and cleaned up in all_reduce 2, which rank 0 never entered" in role["findings"][0]
    handle.stop(force=True)


@pytest.mark.slow
def test_a_rank_whose_exit_function_waits_has_failed_before(local_cluster: Cluster, project: Project) -> None:
    project(ranks=RANKS)
    handle = submit(local_cluster(nodes=1, devices=2), "ranks.fails", "atexit")
    assert handle.wait(timeout=200) == 1
    end = handle.status().end
    assert end is not None
    assert end.failure.summary == "ValueError: boom"


def test_a_rank_that_ended_before_its_peers_is_named_in_their_failure(local_cluster: Cluster, project: Project) -> None:
    project(ranks=RANKS)
    handle = submit(local_cluster(nodes=1, devices=2), "ranks.ends")
    assert handle.wait(timeout=200) == 1
    end = handle.status().end
    assert end is not None
    assert end.failure.summary.startswith(
        "the program of rank 1 had ended after 29 collectives, and rank 0 was in collective 30: RuntimeError: "
    )


@pytest.mark.slow
def test_a_rank_that_ended_and_answers_calls_is_named_in_the_verdict(local_cluster: Cluster, project: Project) -> None:
    project(ranks=RANKS, answers=ANSWERS)
    handle = submit(local_cluster(nodes=1, devices=2), "answers.Answers", hang_timeout=2)
    assert handle.wait(timeout=200) == 1
    end = handle.status().end
    assert end is not None
    finding = "rank 1 never entered all_reduce 30; the program of rank 1 had ended after 29 collectives"
    assert end.failure.summary.startswith(f"hang: no progress for 2 s; {finding}")
    assert end.worker == next(one.name for one in handle.status().workers if one.rank == 1 and one.role != "store")
