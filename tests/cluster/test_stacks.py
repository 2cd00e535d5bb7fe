"""Stacks of a real job's workers, whatever they stand in: `unified stack`."""

import json
import re
from typing import Any, Protocol

import pytest

from tests.cluster.conftest import Cluster, Project
from unified.api.builder import DLJobBuilder
from unified.cli.main import main
from unified.testing import LocalCluster, eventually

pytestmark = pytest.mark.processes

RANKS = """
import os, time
import torch
import torch.distributed as dist

def run():
    value = torch.ones(1)
    for step in range(3):
        dist.all_reduce(value)
    print("ready", flush=True)
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.all_reduce(value)
"""

STANDING = """
import ctypes, os, signal, threading, time

def hold():
    # Waits for ever in C, without giving the interpreter back.
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    print("ready", flush=True)
    library.pthread_mutex_lock(mutex)

def busy_in_c():
    hold()

def stopped():
    print("ready", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)

def deadlocked():
    first, second = threading.Lock(), threading.Lock()

    def in_turn(one, other):
        with one:
            time.sleep(0.1)
            with other:
                pass

    thread = threading.Thread(target=in_turn, args=(first, second), name="the-other")
    thread.start()
    print("ready", flush=True)
    in_turn(second, first)

def with_a_handler():
    signal.signal(signal.SIGUSR2, lambda *_: print("SIGUSR2 came", flush=True))
    hold()
"""


class Show(Protocol):
    def __call__(self, *words: str) -> str: ...


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    """Run `unified stack` and return what it printed."""

    def run(*words: str) -> str:
        capsys.readouterr()
        assert main(["stack", *words]) == 0
        return capsys.readouterr().out

    return run


def stacks(show: Show, cluster: LocalCluster, job: str) -> Any:
    return json.loads(show(job, "--master", cluster.address, "--json"))


def functions(frames: list[str]) -> list[str]:
    return [frame.rpartition(" in ")[2] for frame in frames]


@pytest.mark.slow
def test_a_rank_that_never_entered_a_collective_is_named(local_cluster: Cluster, project: Project, show: Show) -> None:
    project(ranks=RANKS)
    builder = DLJobBuilder().node_num(2).device_per_node(2).device_type("CPU")
    builder.role("trainer").train("ranks.run").total(4).per_group(2)
    cluster = local_cluster(nodes=2, devices=2)
    handle = cluster.submit(builder.build(), "hung")
    eventually(lambda: "\n".join(handle.logs()).count("ready") == 4, timeout=100)

    found = eventually(
        lambda: (data := stacks(show, cluster, "hung"))["roles"]["trainer"]["findings"] and data,
        timeout=100,
    )["roles"]["trainer"]
    assert len(found["findings"]) == 1
    assert re.fullmatch(
        r"rank 1 never entered all_reduce 4 \(ranks 0, 2, 3 have waited in it for \d+ s\)", found["findings"][0]
    )
    assert found["culprits"] == ["trainer_4-1_2-1"]
    main = [group for group in found["groups"] if group["is_main"]]
    assert [len(group["workers"]) for group in main] == [3, 1], "equal stacks are one group"
    assert "all_reduce" in functions(main[0]["frames"])
    assert functions(main[1]["frames"])[-1] == "run"

    text = show("hung", "--master", cluster.address, "--role", "trainer")
    assert "rank 1 never entered all_reduce 4" in text
    assert "ranks 0, 2, 3 (3 of 4), MainThread" in text
    handle.stop(force=True)


@pytest.mark.usefixtures("without_torch")
def test_workers_that_cannot_answer(local_cluster: Cluster, project: Project, show: Show) -> None:
    project(standing=STANDING)
    roles = ("busy_in_c", "stopped", "deadlocked", "with_a_handler")
    builder: Any = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU")
    for role in roles:
        builder = builder.workload(role, f"standing.{role}").resource(cpu=0.1)
    cluster = local_cluster(nodes=1, devices=1)
    handle = cluster.submit(builder.build(), "standing")
    eventually(lambda: "\n".join(handle.logs()).count("ready") == 4, timeout=100)

    def by_role() -> dict[str, Any]:
        found = stacks(show, cluster, "standing")
        return {worker["worker"].partition("_1-")[0]: worker for worker in found["workers"]}

    def none_goes_on() -> dict[str, Any] | None:
        workers = by_role()
        return workers if sum(worker["source"] == "interpreter" for worker in workers.values()) == 1 else None

    workers = eventually(none_goes_on, timeout=100)
    assert workers is not None
    held = workers["busy_in_c"]
    assert held["source"] == "faulthandler", held
    assert functions(next(thread for thread in held["threads"] if thread["is_main"])["frames"])[-2:] == [
        "busy_in_c",
        "hold",
    ]
    assert "interpreter is held" in held["note"]
    assert "SIGSTOP" in workers["stopped"]["note"]
    assert workers["stopped"]["source"] in ("none", "py-spy")
    locked = workers["deadlocked"]
    assert locked["source"] == "interpreter"
    ends = {thread["name"]: functions(thread["frames"])[-1] for thread in locked["threads"]}
    assert ends["MainThread"] == ends["the-other"] == "in_turn"
    assert workers["with_a_handler"]["source"] in ("none", "py-spy"), "its handler would have been called"
    assert not any("SIGUSR2" in line for line in handle.logs())
    assert handle.status().stage == "RUNNING", "nobody was hurt"
    handle.stop(force=True)
