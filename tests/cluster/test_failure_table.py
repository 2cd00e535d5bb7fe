"""Each row of the table in docs/failures.md, on real daemons: what the user sees, and which limits are charged."""

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cluster.conftest import PROGRAMS, LightDaemon, memory_group
from unified import process
from unified.api.builder import DLJobBuilder
from unified.cli.main import main
from unified.client.embedded import EmbeddedCluster
from unified.client.handle import JobHandle
from unified.errors import RemoteError, WorkerDiedError
from unified.job.config import JobConfig
from unified.job.spec import JobSpec
from unified.job.to_spec import to_spec
from unified.protocol.client_master import Explain, JobStatus, Story
from unified.protocol.records import NodeState, Stage, WorkerState
from unified.testing import FAST, Belongings, LocalCluster, eventually, left_behind

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
WITHIN_S = 100.0
MEMORY_BYTES = 512 * 2**20


def documented() -> dict[str, set[str]]:
    """Return what each row of the failure table is charged to: the first column names it, the last one the limits."""
    rows: dict[str, set[str]] = {}
    for line in (ROOT / "docs/failures.md").read_text().splitlines():
        if found := re.match(r"\| `([a-z-]+)` \|.*\|([^|]*)\|$", line):
            assert found[1] not in rows, f"{found[1]} is there twice"
            rows[found[1]] = set(re.findall(r"`(\w+)`", found[2]))
    return rows


class Bench:
    """A cluster, and jobs whose workers fail as told."""

    def __init__(self, folder: Path, cluster: LocalCluster) -> None:
        self.folder = folder
        self.cluster = cluster
        self.handles: list[JobHandle] = []

    def begin(self, job: Any, **options: Any) -> JobHandle:
        """Submit a job, under a name of its own."""
        name = None if isinstance(job, JobSpec) else f"{self.folder.name}-{len(self.handles)}"
        self.handles.append(self.cluster.submit(job, name, **options))
        return self.handles[-1]

    def end(self) -> None:
        """Stop what a failed test left running."""
        for handle in self.handles:
            if handle.status().stage is not Stage.STOPPED:
                handle.stop(force=True)

    def submit(
        self, entry: str = "work", *, total: int = 1, envs: dict[str, str] | None = None, **more: Any
    ) -> JobHandle:
        """Submit a job with one role `r`; `more` are fields of the role, and options of `submit`."""
        roles = ("max_restart", "per_node_max_failure", "restart_alone", "accelerator", "hang_timeout")
        role = {name: more.pop(name) for name in roles if name in more}
        return self.begin(self.job(entry, total, envs or {}, **role).build(), **more)

    def job(self, entry: str, total: int, envs: dict[str, str], accelerator: float = 0, **role: Any) -> Any:
        envs = {"FOLDER": str(self.folder), **envs}
        builder: Any = DLJobBuilder().node_num(3).device_per_node(2).device_type("CPU").global_env(envs)
        builder = (
            builder.workload("r", f"failing_roles.{entry}").total(total).resource(cpu=0.1, accelerator=accelerator)
        )
        for name, value in role.items():
            builder = getattr(builder, name)(*([] if value is True else [value]))
        return builder

    def running(self, handle: JobHandle, incarnations: Sequence[int]) -> JobStatus:
        """Wait until the workers of `r`, by rank, run in these incarnations."""

        def status() -> JobStatus | None:
            found = handle.status()
            assert found.stage is not Stage.STOPPED
            run = all(worker.state is WorkerState.RUNNING for worker in found.workers)
            return found if run and [worker.incarnation for worker in found.workers] == list(incarnations) else None

        with contextlib.suppress(AssertionError):
            if (found := eventually(status, timeout=WITHIN_S)) is not None:
                return found
        pytest.fail(f"the workers did not run in incarnations {incarnations}:\n{self.story(handle)}")

    def ends_well(self, handle: JobHandle) -> JobStatus:
        (self.folder / "end").touch()
        assert handle.wait(timeout=WITHIN_S) == 0, handle.status().reason
        return handle.status()

    def fails(self, handle: JobHandle, limit: str) -> JobStatus:
        assert handle.wait(timeout=WITHIN_S) == 1
        status = handle.status()
        assert status.end is not None
        assert status.end.limit == limit
        return status

    def story(self, handle: JobHandle) -> str:
        events = handle.connection.ask(Explain(job=handle.job_id), Story).events
        return "\n".join(f"{event.event} {event.worker}: {event.reason}" for event in events)

    def repaired(self, how: str, said: str, **more: Any) -> JobStatus:
        """Have rank 0 fail once; return the status of the job, which went on and ended well."""
        handle = self.submit(envs={"HOW": how, **more.pop("envs", {})}, **more)
        self.running(handle, [1] * more.get("total", 1))
        assert said in self.story(handle)
        return self.ends_well(handle)


Check = Callable[[Bench], JobStatus]


def handler_exception(bench: Bench) -> JobStatus:
    handle = _with_service(bench)
    with pytest.raises(RemoteError, match="division by zero") as error:
        handle.call("s-0", "divide", 1, 0).result(timeout=WITHIN_S)
    assert error.value.type_name == "ZeroDivisionError"
    assert "return dividend / divisor" in error.value.traceback
    assert handle.call("s-0", "divide", 1, 2).result(timeout=WITHIN_S) == 0.5
    return bench.ends_well(handle)


def _with_service(bench: Bench, **options: Any) -> JobHandle:
    """A job of a driver that waits, and a service beside it."""
    builder = bench.job("work", 1, {"TIMES": "0"})
    builder = builder.workload("s", "failing_roles.Service").resource(cpu=0.1).service()
    handle = bench.begin(builder.build(), **options)
    eventually(lambda: handle.status().stage is Stage.RUNNING, timeout=WITHIN_S)
    return handle


def entry_exception(bench: Bench) -> JobStatus:
    return bench.repaired("raise", "ValueError: loss is NaN (category user)")


def worker_exit(bench: Bench) -> JobStatus:
    return bench.repaired("exit", "exited with code 3; its last output: no license found (category crash)")


def worker_killed(bench: Bench) -> JobStatus:
    handle = _with_service(bench)
    call = handle.call("s-0", "hold")
    eventually(lambda: len(bench.cluster.workers(handle)) == 2)
    (pid,) = (pid for name, pid in bench.cluster.workers(handle).items() if name.startswith("s_"))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"killed by SIGKILL, which its agent did not send; .* MB of memory"):
        call.result(timeout=WITHIN_S)
    assert "killed by SIGKILL, which its agent did not send" in bench.story(handle)
    assert handle.call("s-0", "divide", 1, 2).result(timeout=WITHIN_S) == 0.5
    return bench.ends_well(handle)


def worker_terminated(bench: Bench) -> JobStatus:
    return bench.repaired("terminate", "killed by SIGTERM, which its agent did not send")


def worker_fault(bench: Bench) -> JobStatus:
    return bench.repaired("fault", 'killed by SIGSEGV; its last output: File "')


def out_of_memory(bench: Bench) -> JobStatus:
    with memory_group(MEMORY_BYTES) as group:
        return bench.repaired("memory", "out of memory: ", envs={"GROUP": str(group)})


def hang(bench: Bench) -> JobStatus:
    handle = bench.submit("stall", hang_timeout=5)
    bench.running(handle, [1])
    story = bench.story(handle)
    assert "hang-diagnosed" in story
    assert "(category hang)" in story
    return bench.ends_well(handle)


def setup_failure(bench: Bench) -> JobStatus:
    handle = bench.submit("missing")
    status = bench.fails(handle, "not restarted: a setup failure would happen again")
    assert "missing" in status.reason
    return status


def dies_at_once(bench: Bench) -> JobStatus:
    handle = bench.submit(envs={"TIMES": "0", "DIES_IN_IMPORT": "3"}, restart_backoff=0.3)
    bench.running(handle, [3])
    story = bench.story(handle)
    assert "job restarts: r_1-0_1-0" in story
    assert story.count("job restarts after 0.3 s: ") == 2
    return bench.ends_well(handle)


def max_restart_used_up(bench: Bench) -> JobStatus:
    handle = bench.submit(envs={"HOW": "raise", "TIMES": "9"}, max_restart=1)
    status = bench.fails(handle, "max_restart")
    assert "ValueError: loss is NaN; the limit max_restart=1 of role r is used up" in status.reason
    return status


def same_error_twice(bench: Bench) -> JobStatus:
    handle = bench.submit(envs={"HOW": "raise", "TIMES": "9"})
    status = bench.fails(handle, "permanent")
    why = "permanent: the same error at the same line before any step, twice"
    assert f"ValueError: loss is NaN; {why}" in status.reason
    assert why in bench.story(handle)
    assert status.workers[0].incarnation == 1
    return status


def no_new_step(bench: Bench) -> JobStatus:
    envs = {"HOW": "raise", "TIMES": "9", "STEP": "1"}
    handle = bench.submit(envs=envs, per_node_max_failure=9, restart_backoff=0.0)
    status = bench.fails(handle, "permanent")
    assert "permanent: 5 failures in a row, and no step beyond 1" in status.reason
    assert status.workers[0].incarnation == 4
    return status


def job_max_restart_used_up(bench: Bench) -> JobStatus:
    handle = bench.submit(envs={"HOW": "raise", "TIMES": "9", "STEP": "1"}, job_max_restart=1)
    status = bench.fails(handle, "job_max_restart")
    assert "the limit job_max_restart=1 is used up" in status.reason
    return status


def role_restarts(bench: Bench) -> JobStatus:
    return bench.repaired("raise", "role r restarts: r_2-0_1-0", total=2, failover_exec_strategy=2)


def worker_restarts_alone(bench: Bench) -> JobStatus:
    handle = bench.submit(envs={"HOW": "raise"}, total=2, restart_alone=True)
    bench.running(handle, [1, 0])
    return bench.ends_well(handle)


def never_restarted(bench: Bench) -> JobStatus:
    status = bench.fails(bench.submit(envs={"HOW": "raise"}, failover_exec_strategy=0), "failover_exec_strategy=0")
    assert "failover_exec_strategy=0 stops the job at a failure" in status.reason
    handle = bench.submit(envs={"HOW": "raise"}, failover_trigger_strategy=0)
    return bench.fails(handle, "failover_trigger_strategy=0")


def node_excluded(bench: Bench) -> JobStatus:
    handle = bench.submit(envs={"HOW": "raise"}, per_node_max_failure=0)
    status = bench.running(handle, [1])
    (first,) = re.findall(r"node (node-\d) is excluded for this job: 1 failures of role r there", bench.story(handle))
    assert status.workers[0].node != first
    return bench.ends_well(handle)


def no_node_left(bench: Bench) -> JobStatus:
    handle = bench.submit(envs={"HOW": "raise", "TIMES": "9", "STEP": "1"}, per_node_max_failure=0, max_restart=2)
    status = bench.fails(handle, "max_restart")
    story = bench.story(handle)
    assert re.search(r"node node-\d is excluded for this job", story)
    assert re.search(r"node node-\d is kept, since the job does not fit on what is left: 1 failures of role r", story)
    return status


def _on_two_nodes(bench: Bench) -> tuple[JobHandle, str]:
    handle = bench.submit(total=2, envs={"TIMES": "0"}, accelerator=2)
    nodes = [worker.node for worker in bench.running(handle, [0, 0]).workers]
    assert len(set(nodes)) == 2
    return handle, nodes[0]


def node_lost(bench: Bench) -> JobStatus:
    handle, lost = _on_two_nodes(bench)
    bench.cluster.kill_agent(int(lost.removeprefix("node-")) - 1)
    assert lost not in {worker.node for worker in bench.running(handle, [1, 1]).workers}
    assert re.search(
        rf"job restarts: node {lost} was lost: .* \(loss 1 of that node, node_max_restart=10\)", bench.story(handle)
    )
    return bench.ends_well(handle)


def node_stopped(bench: Bench) -> JobStatus:
    handle, away = _on_two_nodes(bench)
    bench.cluster.kill_agent(int(away.removeprefix("node-")) - 1, signal.SIGTERM)
    assert away not in {worker.node for worker in bench.running(handle, [1, 0]).workers}
    assert f"workers-move : moves away from node {away}, whose agent stops: SIGTERM" in bench.story(handle)
    return bench.ends_well(handle)


def node_comes_back_quickly(bench: Bench) -> JobStatus:
    """pytorch #147064: there, the restarts are counted by the agent, and a new one begins at 0."""
    handle = bench.submit(envs={"TIMES": "0"}, node_max_restart=1)
    bench.running(handle, [0])
    pid = bench.cluster.kill_agent(0)
    bench.running(handle, [1])
    assert bench.cluster.agent_pids[0] != pid
    bench.cluster.kill_agent(0)
    status = bench.fails(handle, "node_max_restart")
    assert "the limit node_max_restart=1 is used up for node node-1" in status.reason
    return status


def node_group_given_up(bench: Bench) -> JobStatus:
    """Node 1 is lost, and what starts on node 2, in the same rack, hangs."""
    envs = {"TIMES": "0", "HANGS_ON": "node-2"}
    builder = bench.job("work", 1, envs, accelerator=2).enable_node_group_failover("rack")
    spec = to_spec(JobConfig(job_name="table", dl_config=builder.build()))
    spec = msgspec.structs.replace(spec, roles=[msgspec.structs.replace(spec.roles[0], failover_timeout_s=5.0)])
    handle = bench.begin(spec)
    assert bench.running(handle, [0]).workers[0].node == "node-1"
    bench.cluster.kill_agent(0)
    assert bench.running(handle, [2]).workers[0].node == "node-3"
    why = "role r does not run again 5 s after node-1 failed: all nodes with rack=a are given up for this job"
    assert why in bench.story(handle)
    return bench.ends_well(handle)


def node_drained(bench: Bench) -> JobStatus:
    handle, away = _on_two_nodes(bench)
    assert main(["drain", away, "--master", bench.cluster.address, "--reason", "a new disk"]) == 0
    assert away not in {worker.node for worker in bench.running(handle, [1, 0]).workers}
    assert f"workers-move : moves away from node {away}, which is drained: a new disk" in bench.story(handle)
    (node,) = (each for each in bench.cluster.nodes if each.node == away)
    assert (node.drained, node.num_workers, node.num_leaving) == ("a new disk", 0, 0)
    bench.cluster.kill_agent(int(away.removeprefix("node-")) - 1)
    eventually(lambda: any(each.node == away and each.state is NodeState.LOST for each in bench.cluster.nodes))
    assert main(["undrain", away, "--master", bench.cluster.address]) == 0
    assert all(each.drained is None for each in bench.cluster.nodes)
    return bench.ends_well(handle)


def job_suspended(bench: Bench) -> JobStatus:
    handle = bench.submit(total=2, envs={"TIMES": "0"})
    bench.running(handle, [0, 0])
    assert main(["suspend", handle.job_id, "--master", bench.cluster.address, "--reason", "a new switch"]) == 0
    status = handle.status()
    assert (status.stage, status.suspended, status.num_leaving) == (Stage.INIT, "a new switch", 0)
    assert main(["resume", handle.job_id, "--master", bench.cluster.address]) == 0
    bench.running(handle, [1, 1])
    assert "job-suspended : suspended: a new switch" in bench.story(handle)
    assert "job-resumed " in bench.story(handle)
    return bench.ends_well(handle)


def zygote_killed(bench: Bench) -> JobStatus:
    handle = bench.submit(envs={"TIMES": "0"})
    bench.running(handle, [0])
    _signal_zygote(bench, handle, signal.SIGKILL)
    bench.running(handle, [1])
    assert "killed by SIGKILL: the zygote that it was forked from was killed by SIGKILL" in bench.story(handle)
    return bench.ends_well(handle)


def zygote_killed_with_others(bench: Bench) -> JobStatus:
    """Four workers that restart alone: one more charged failure than one, and the node would be used up."""
    handle = bench.submit(total=4, envs={"TIMES": "0"}, restart_alone=True, per_node_max_failure=1)
    bench.running(handle, [0] * 4)
    found = process.facts(next(iter(bench.cluster.workers(handle).values())))
    assert found is not None
    os.kill(found.parent, signal.SIGKILL)
    status = bench.running(handle, [1] * 4)
    assert sorted((use.limit, use.used) for use in status.budgets) == [("max_restart", 1), ("per_node_max_failure", 1)]
    (payer,) = (use.subject for use in status.budgets if use.limit == "max_restart")
    assert bench.story(handle).count(f"(charged once, to {payer})") == 3
    return bench.ends_well(handle)


def zygote_hangs(bench: Bench) -> JobStatus:
    """It is stopped between two jobs: the first one goes on."""
    first = bench.submit(envs={"TIMES": "0"})
    bench.running(first, [0])
    _signal_zygote(bench, first, signal.SIGSTOP)
    second = bench.submit(envs={"TIMES": "0"})
    bench.running(second, [1])
    assert re.search(r"could not be started: its zygote \(pid \d+\) hangs: it has said noth", bench.story(second))
    bench.running(first, [0])
    bench.ends_well(first)
    return bench.ends_well(second)


def _signal_zygote(bench: Bench, handle: JobHandle, sig: signal.Signals) -> None:
    (worker,) = bench.cluster.workers(handle).values()
    found = process.facts(worker)
    assert found is not None
    os.kill(found.parent, sig)


def master_killed(bench: Bench) -> JobStatus:
    handle = bench.submit(envs={"TIMES": "0"})
    pids = [worker.pid for worker in bench.running(handle, [0]).workers]
    before = bench.cluster.master_pid
    os.kill(before, signal.SIGKILL)
    eventually(lambda: bench.cluster.master_pid != before, timeout=WITHIN_S)
    assert [worker.pid for worker in bench.running(handle, [0]).workers] == pids
    return bench.ends_well(handle)


def collateral(bench: Bench) -> JobStatus:
    builder: Any = DLJobBuilder().device_per_node(2).device_type("CPU")
    builder = builder.global_env({"FOLDER": str(bench.folder), "HOW": "kill"})
    builder.role("r").train("failing_roles.train").nnodes(1).nproc_per_node(2)
    handle = bench.begin(builder.build(), failover_exec_strategy=2)
    bench.running(handle, [1, 1])
    assert "r_2-0_2-0: incarnation 0 on node-1: killed by SIGKILL" in bench.story(handle)
    status = bench.ends_well(handle)
    assert [worker.num_failures for worker in status.workers] == [1, 0]
    return status


def store_killed(bench: Bench) -> JobStatus:
    builder: Any = DLJobBuilder().device_per_node(2).device_type("CPU")
    builder = builder.global_env({"FOLDER": str(bench.folder), "TIMES": "0"})
    builder.role("r").train("failing_roles.train").nnodes(1).nproc_per_node(2)
    handle = bench.begin(builder.build())
    bench.running(handle, [0, 0])
    kill_store(bench)
    bench.running(handle, [1, 1])
    assert "job restarts: the torch store on node-1: killed by SIGKILL" in bench.story(handle)
    return bench.ends_well(handle)


def kill_store(bench: Bench) -> None:
    names = {found.pid: Path(f"/proc/{found.pid}/comm") for found in process.every_process()}
    marked = [int(line.partition(" ")[0]) for line in bench.cluster.processes()]
    (store,) = (pid for pid in marked if pid in names and names[pid].read_text().strip() == "unified-store")
    os.kill(store, signal.SIGKILL)


SHARED: dict[str, Check] = {
    "handler-exception": handler_exception,
    "entry-exception": entry_exception,
    "worker-exit": worker_exit,
    "worker-killed": worker_killed,
    "worker-terminated": worker_terminated,
    "worker-fault": worker_fault,
    "out-of-memory": out_of_memory,
    "hang": hang,
    "setup-failure": setup_failure,
    "dies-at-once": dies_at_once,
    "same-error-twice": same_error_twice,
    "no-new-step": no_new_step,
    "max-restart-used-up": max_restart_used_up,
    "job-max-restart-used-up": job_max_restart_used_up,
    "role-restarts": role_restarts,
    "worker-restarts-alone": worker_restarts_alone,
    "never-restarted": never_restarted,
    "node-excluded": node_excluded,
    "no-node-left": no_node_left,
    "zygote-killed": zygote_killed,
    "job-suspended": job_suspended,
}
"""Rows whose jobs hurt no daemon, so that one cluster serves them all."""

OWN: dict[str, tuple[Check, dict[str, Any]]] = {
    "node-lost": (node_lost, {"nodes": 3, "devices": 2}),
    "node-stopped": (node_stopped, {"nodes": 3, "devices": 2}),
    "node-drained": (node_drained, {"nodes": 3, "devices": 2}),
    "node-comes-back-quickly": (node_comes_back_quickly, {"nodes": 1, "restart_agents": 9}),
    "node-group-given-up": (node_group_given_up, {"nodes": 3, "devices": 2}),
    "zygote-killed-with-others": (zygote_killed_with_others, {"nodes": 1}),
    "zygote-hangs": (zygote_hangs, {"nodes": 1, "env": {"UNIFIED_FORK_S": "3"}}),
    "master-killed": (master_killed, {"nodes": 1, "restart_master": 1}),
}
"""Rows with a cluster of their own."""
LONG = ("node-group-given-up", "zygote-hangs")

WITH_TORCH: dict[str, Check] = {"collateral": collateral, "store-killed": store_killed}


class RackDaemon(LightDaemon):
    """An agent without torch, whose rack is a for the first two nodes and b for the others; the fourth is a spare."""

    def __init__(
        self, module: str, arguments: Sequence[str], log_file: Path, env: Any, *, has_input: bool = False
    ) -> None:
        if module == "unified_agent":
            rack = "a" if {"node-1", "node-2"} & set(arguments) else "b"
            spare = ",spare=yes" if "node-4" in arguments else ""
            arguments = [*arguments, "--labels", f"rack={rack}{spare}"]
        super().__init__(module, arguments, log_file, env, has_input=has_input)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unified.client.embedded.Daemon", LightDaemon)
        patch.syspath_prepend(str(PROGRAMS))
        cluster = LocalCluster(2, 2, home=tmp_path_factory.mktemp("table") / "cluster").start()
        yield cluster
        assert cluster.stop() == []


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))


def check(row: str, test: Check, bench: Bench) -> None:
    try:
        found = test(bench)
    finally:
        bench.end()
    charged = {use.limit for use in found.budgets}
    assert charged == documented()[row], f"{row}: {found.budgets}"


@pytest.mark.smoke
@pytest.mark.parametrize("row", SHARED)
def test_a_failure_of_a_job(row: str, shared: LocalCluster, programs: None, tmp_path: Path) -> None:
    check(row, SHARED[row], Bench(tmp_path, shared))


@pytest.mark.parametrize("row", [pytest.param(row, marks=pytest.mark.slow) if row in LONG else row for row in OWN])
def test_a_failure_of_a_daemon(
    row: str,
    local_cluster: Callable[..., LocalCluster],
    programs: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("unified.client.embedded.Daemon", RackDaemon)
    test, options = OWN[row]
    check(row, test, Bench(tmp_path, local_cluster(**options)))


@pytest.mark.slow
@pytest.mark.parametrize("row", WITH_TORCH)
def test_a_failure_of_an_elastic_role(
    row: str, local_cluster: Callable[..., LocalCluster], programs: None, tmp_path: Path
) -> None:
    check(row, WITH_TORCH[row], Bench(tmp_path, local_cluster(nodes=1)))


def test_a_master_that_is_killed_too_often(tmp_path: Path, without_torch: None) -> None:
    before = Belongings()
    with EmbeddedCluster(1, 1, home=tmp_path / "cluster", env=FAST, max_master_restarts=1) as cluster:
        os.kill(first := cluster.master_pid, signal.SIGKILL)
        eventually(lambda: cluster.master_pid != first, timeout=WITHIN_S)
        os.kill(cluster.master_pid, signal.SIGKILL)
        problem = eventually(lambda: cluster.problem, timeout=WITHIN_S)
        assert problem is not None
        assert "the embedded master ended 2 times (master_max_restart=1)" in problem
    assert left_behind(before) == []
    assert documented()["master-killed-too-often"] == {"master_max_restart"}
