"""Further rows of the table in docs/failures.md: what silence, a hang or a loss costs, and recovery in place."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from tests.cluster import test_engine_roles as engines
from tests.cluster import test_failure_table as table
from tests.cluster.test_failure_table import WITHIN_S, Bench, Check, check, documented, programs  # noqa: F401
from tests.cluster.test_node_ranges import QUICK
from unified import process
from unified.api.builder import DLJobBuilder
from unified.cli.main import main
from unified.client.handle import JobHandle
from unified.job.config import JobConfig
from unified.job.to_spec import to_spec
from unified.protocol.client_master import JobStatus, WorkerStatus
from unified.protocol.records import NodeState, WorkerState
from unified.testing import LocalCluster, eventually

pytestmark = pytest.mark.processes


def on_two_of_three(bench: Bench) -> tuple[JobHandle, int]:
    """Begin a job of two workers on two nodes, with a third in reserve; return the index of the first worker's node."""
    handle = bench.submit(total=2, envs={"TIMES": "0"}, accelerator=2)
    return handle, index_of(bench.running(handle, [0, 0]).workers[0].node)


def index_of(node: str | None) -> int:
    return int((node or "").removeprefix("node-")) - 1


def moved(bench: Bench, handle: JobHandle, index: int) -> JobStatus:
    """Wait for the next incarnation of both workers, elsewhere; return the status of the job, which ends well."""
    status = bench.running(handle, [1, 1])
    assert index not in {index_of(worker.node) for worker in status.workers}
    return bench.ends_well(handle)


def helper(agent: int, name: str) -> psutil.Process:
    return next(each for each in psutil.Process(agent).children() if each.name() == name)


def node_silent(bench: Bench) -> JobStatus:
    """All processes of a node are killed at once, as when its host dies, and first the one that would tell of it."""
    handle, index = on_two_of_three(bench)
    agent = psutil.Process(bench.cluster.agent_pids[index])
    others = agent.children(recursive=True)
    helper(agent.pid, "unified-lease").kill()
    bench.cluster.kill_agent(index)
    for other in others:
        with contextlib.suppress(psutil.NoSuchProcess):  # one that ends with its parent
            other.kill()
    status = moved(bench, handle, index)
    assert "was lost: nothing was heard from its agent for" in bench.story(handle)
    return status


def spare_taken(bench: Bench) -> JobStatus:
    handle = bench.submit(total=3, envs={"TIMES": "0"}, accelerator=2)
    nodes = [worker.node for worker in bench.running(handle, [0, 0, 0]).workers]
    assert sorted(map(str, nodes)) == ["node-1", "node-2", "node-3"]
    bench.cluster.kill_agent(0)
    nodes = [worker.node for worker in bench.running(handle, [1, 1, 1]).workers]
    assert sorted(map(str, nodes)) == ["node-2", "node-3", "node-4"]
    return bench.ends_well(handle)


def agent_hangs(bench: Bench) -> JobStatus:
    handle, index = on_two_of_three(bench)
    pid = bench.cluster.kill_agent(index, signal.SIGSTOP)
    status = moved(bench, handle, index)
    assert f"was lost: its agent (pid {pid}) ended" in bench.story(handle)
    assert "the agent has done nothing for" in (bench.cluster.home / f"node-{index + 1}.log").read_text()
    return status


def agent_pauses(bench: Bench) -> JobStatus:
    handle, index = on_two_of_three(bench)
    pid = bench.cluster.kill_agent(index, signal.SIGSTOP)
    time.sleep(5.0)  # more than the lease of 4 s, and less than two of them
    os.kill(pid, signal.SIGCONT)
    bench.running(handle, [0, 0])
    assert bench.cluster.nodes[index].state is NodeState.ALIVE
    return bench.ends_well(handle)


def lease_keeper_killed(bench: Bench) -> JobStatus:
    handle, index = on_two_of_three(bench)
    helper(bench.cluster.agent_pids[index], "unified-lease").kill()
    log = bench.cluster.home / f"node-{index + 1}.log"
    eventually(lambda: "event=lease-keeper-lost" in log.read_text(), timeout=WITHIN_S)
    time.sleep(3.0)  # more than the lease of 2 s
    bench.running(handle, [0, 0])
    return bench.ends_well(handle)


def role_max_restart_used_up(bench: Bench) -> JobStatus:
    spec = to_spec(
        JobConfig(job_name="limited", dl_config=bench.job("work", 1, {"HOW": "raise", "TIMES": "9"}).build())
    )
    spec = msgspec.structs.replace(spec, roles=[msgspec.structs.replace(spec.roles[0], role_max_restart=1)])
    status = bench.fails(bench.begin(spec), "role_max_restart")
    assert "the limit role_max_restart=1 (--max-restarts) of role r is used up" in status.reason
    return status


def elastic_job(bench: Bench, entry: str, nodes: str | int, **options: Any) -> JobHandle:
    builder: Any = DLJobBuilder().node_num(2).device_per_node(1).device_type("CPU")
    builder = builder.global_env({"FOLDER": str(bench.folder), "TIMES": "0"})
    builder.role("r").train(f"failing_roles.{entry}").nnodes(nodes).nproc_per_node(1)
    return bench.begin(builder.build(), **options)


def running_in(bench: Bench, handle: JobHandle, number: int) -> JobStatus:
    """Wait until so many workers run, and the others wait for a node."""

    def found() -> JobStatus | None:
        status = handle.status()
        states = [worker.state for worker in status.workers]
        is_so = states.count(WorkerState.RUNNING) == number and set(states) <= {
            WorkerState.RUNNING,
            WorkerState.PENDING,
        }
        return status if is_so else None

    with contextlib.suppress(AssertionError):
        if (status := eventually(found, timeout=WITHIN_S)) is not None:
            return status
    pytest.fail(f"not {number} workers run:\n{bench.story(handle)}")


def in_loop(bench: Bench, handle: JobHandle) -> list[WorkerStatus]:
    """Wait until both ranks are in the loop, and so able to outlive a round."""
    began = [bench.folder / f"began-{rank}" for rank in range(2)]
    eventually(lambda: all(file.exists() for file in began), timeout=WITHIN_S, message="the loop does not begin")
    return bench.running(handle, [0, 0]).workers


def role_shrinks(bench: Bench) -> JobStatus:
    handle = elastic_job(bench, "train", "1:2")
    last = running_in(bench, handle, 2).workers[1]
    bench.cluster.kill_agent(index_of(last.node))
    running_in(bench, handle, 1)
    return bench.ends_well(handle)


def role_grows(bench: Bench) -> JobStatus:
    assert main(["drain", "node-2", "--master", bench.cluster.address]) == 0
    handle = elastic_job(bench, "train", "1:2")
    running_in(bench, handle, 1)
    assert main(["undrain", "node-2", "--master", bench.cluster.address]) == 0
    running_in(bench, handle, 2)
    return bench.ends_well(handle)


def rank_killed_in_place(bench: Bench) -> JobStatus:
    handle = elastic_job(bench, "loop", 2)
    before = in_loop(bench, handle)
    os.kill(before[1].pid, signal.SIGKILL)
    after = bench.running(handle, [0, 1]).workers
    assert after[0].pid == before[0].pid
    return bench.ends_well(handle)


def rank_killed_unseen(bench: Bench) -> JobStatus:
    """Its zygote stands still meanwhile: the other rank, whose collective fails, is charged until its end is known."""
    handle = elastic_job(bench, "loop", 2)
    survivor, victim = in_loop(bench, handle)
    found = process.facts(victim.pid)
    assert found is not None
    os.kill(found.parent, signal.SIGSTOP)
    try:
        os.kill(victim.pid, signal.SIGKILL)
        eventually(lambda: "a collective failed, and no worker did" in bench.story(handle), timeout=WITHIN_S)
    finally:
        os.kill(found.parent, signal.SIGCONT)
    status = bench.running(handle, [0, 1])
    assert status.workers[0].pid == survivor.pid
    uses = sorted((use.limit, use.used, use.subject) for use in status.budgets)
    assert uses == [("max_restart", 1, victim.name), ("per_node_max_failure", 1, f"r on {victim.node}")]
    return bench.ends_well(handle)


def store_killed_in_place(bench: Bench) -> JobStatus:
    handle = elastic_job(bench, "loop", 2)
    before = in_loop(bench, handle)
    table.kill_store(bench)
    eventually(lambda: "round 2 of role r" in bench.story(handle), timeout=WITHIN_S)
    after = bench.running(handle, [0, 0]).workers
    assert [worker.pid for worker in after] == [worker.pid for worker in before]
    return bench.ends_well(handle)


def node_check_fails(bench: Bench) -> JobStatus:
    """Of three nodes one does not work together with any other."""
    builder: Any = DLJobBuilder().node_num(3).device_per_node(1).device_type("CPU")
    builder = builder.global_env({"FOLDER": str(bench.folder), "TIMES": "0", "FAULTY_LINK": "node-1"})
    builder.role("r").train("failing_roles.train").nnodes(3).nproc_per_node(1)
    handle = bench.begin(builder.build(), stop_grace_s=1.0)
    eventually(lambda: "node node-1 is excluded" in bench.story(handle), timeout=WITHIN_S)
    status = running_in(bench, handle, 3)
    assert "node-1" not in {worker.node for worker in status.workers}
    assert "(category node-check)" in bench.story(handle)
    return bench.ends_well(handle)


THREE = {"nodes": 3, "devices": 2}
ROWS: dict[str, tuple[Check, dict[str, Any]]] = {
    "node-silent": (node_silent, THREE),
    "spare-taken": (spare_taken, {"nodes": 4, "devices": 2}),
    "agent-hangs": (agent_hangs, {**THREE, "env": {"UNIFIED_LEASE_S": "4"}}),
    "agent-pauses": (agent_pauses, {**THREE, "env": {"UNIFIED_LEASE_S": "4"}}),
    "lease-keeper-killed": (lease_keeper_killed, THREE),
    "role-max-restart-used-up": (role_max_restart_used_up, {"nodes": 1}),
}
"""Rows of jobs that need no torch, each with a cluster of its own."""
WITH_TORCH: dict[str, tuple[Check, dict[str, Any]]] = {
    "role-shrinks": (role_shrinks, {"nodes": 2, "devices": 1, "env": QUICK}),
    "role-grows": (role_grows, {"nodes": 2, "devices": 1, "env": QUICK}),
    "rank-killed-in-place": (rank_killed_in_place, {"nodes": 2, "devices": 1}),
    "rank-killed-unseen": (rank_killed_unseen, {"nodes": 2, "devices": 1}),
    "store-killed-in-place": (store_killed_in_place, {"nodes": 2, "devices": 1}),
    "node-check-fails": (node_check_fails, {"nodes": 4, "devices": 1}),
}
ELSEWHERE = {"master-killed-too-often", "node-cut-off", "queue-journal-lost"}
"""Rows with tests of their own: the second is in test_cut_off.py, the third in test_queue_jobs.py."""


def test_the_document_has_the_rows_of_these_tests() -> None:
    tested = [*table.SHARED, *table.OWN, *table.WITH_TORCH, *ROWS, *WITH_TORCH, *ELSEWHERE, *engines.ROWS]
    assert sorted(documented()) == sorted(tested)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_a_failure_that_a_lease_is_for(
    row: str,
    local_cluster: Callable[..., LocalCluster],
    programs: None,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("unified.client.embedded.Daemon", table.RackDaemon)
    test, options = ROWS[row]
    check(row, test, Bench(tmp_path, local_cluster(**options)))


@pytest.mark.slow
@pytest.mark.parametrize("row", WITH_TORCH)
def test_a_failure_of_an_elastic_role(
    row: str,
    local_cluster: Callable[..., LocalCluster],
    programs: None,  # noqa: F811
    tmp_path: Path,
) -> None:
    test, options = WITH_TORCH[row]
    check(row, test, Bench(tmp_path, local_cluster(**options)))
