"""Roles with an engine in a real cluster: each failure of the engine, its calls, its addresses, and its stop."""

import contextlib
import http.client
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from tests.cluster.conftest import PROGRAMS, Cluster, LightDaemon, Project, lines, memory_group
from tests.cluster.test_failure_table import WITHIN_S, Bench, Check, check, programs  # noqa: F401
from tests.support.deadlines import missed
from unified import process
from unified.api.builder import DLJobBuilder
from unified.client.handle import JobHandle
from unified.errors import EngineError, RefusedError, WorkerDiedError
from unified.job.config import JobConfig
from unified.job.to_spec import to_spec
from unified.protocol.client_master import JobStatus, WorkerStatus
from unified.protocol.records import NodeState, Stage, WorkerState
from unified.testing import LocalCluster, eventually

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("without_torch")]

SERVER = f"{sys.executable} {PROGRAMS}/engine_server.py --port {{port}}"
MEMORY_BYTES = 512 * 2**20
NOT_READY = r"EngineError: GET /health has not answered \(.*\) for 1 s since its start: the engine is not ready"
ENGINE_FIELDS = ("ready", "start_timeout", "unhealthy_timeout", "stall_timeout")


def begin(bench: Bench, command: str = SERVER, *, total: int = 2, **more: Any) -> JobHandle:
    """Submit a job of a driver that waits, and engines beside it."""
    engine = {name: more.pop(name) for name in ENGINE_FIELDS if name in more}
    role = {name: more.pop(name) for name in ("max_restart", "env") if name in more}
    builder = bench.job("work", 1, {"TIMES": "0"}).role("judge").engine(command, **engine)
    builder = builder.total(total).resource(cpu=0.1)
    for name, value in role.items():
        builder = getattr(builder, name)(value)
    return bench.begin(builder.build(), **more)


def engines(handle: JobHandle) -> list[WorkerStatus]:
    return [worker for worker in handle.status().workers if worker.role == "judge"]


def serving(bench: Bench, handle: JobHandle, *incarnations: int) -> None:
    """Wait until the engines, by rank, are ready in these incarnations."""

    def are_serving() -> bool:
        assert handle.status().stage is not Stage.STOPPED, handle.status().reason
        found = engines(handle)
        all_serve = all(worker.state is WorkerState.SERVING for worker in found)
        return all_serve and [worker.incarnation for worker in found] == list(incarnations)

    try:
        eventually(are_serving, timeout=WITHIN_S)
    except AssertionError as error:
        pytest.fail(f"{error}\n{bench.story(handle)}")


def ask(handle: JobHandle, rank: int, method: str, path: str, *more: Any, **options: Any) -> Any:
    return handle.group("judge")[rank].call("request", method, path, *more, **options).result(WITHIN_S)


def ends_alone(bench: Bench, handle: JobHandle, said: str, hurt: Callable[[int], object]) -> JobStatus:
    """Hurt the engine of rank 0, which a call waits for; return the status of the job, which went on without it."""
    serving(bench, handle, 0, 0)
    first, other = (ask(handle, rank, "GET", "/pid") for rank in (0, 1))
    call = handle.group("judge")[0].call("request", "GET", "/hold")
    eventually(lambda: connections(first), timeout=WITHIN_S)
    hurt(first)
    with pytest.raises(WorkerDiedError, match=said.replace("(", r"\(").replace(")", r"\)")):
        call.result(WITHIN_S)
    serving(bench, handle, 1, 0)
    assert said in bench.story(handle)
    assert not process.is_alive(first)
    assert ask(handle, 0, "GET", "/pid") != first
    assert ask(handle, 1, "GET", "/pid") == other
    assert [worker.num_failures for worker in engines(handle)] == [1, 0]
    assert not [line for line in handle.logs() if "cut short" in line], "it waited for the call that it had passed on"
    return bench.ends_well(handle)


def connections(pid: int) -> int:
    return sum(1 for each in psutil.Process(pid).net_connections() if each.status == psutil.CONN_ESTABLISHED)


def engine_killed(bench: Bench) -> JobStatus:
    return ends_alone(
        bench,
        begin(bench),
        "s (killed by SIGKILL).",
        lambda pid: os.kill(pid, signal.SIGKILL),
    )


def engine_silent(bench: Bench) -> JobStatus:
    return ends_alone(
        bench,
        begin(bench, unhealthy_timeout=2),
        "EngineError: the engine is ended: GET /health has not answered (timed out) for 2 s.",
        lambda pid: os.kill(pid, signal.SIGSTOP),
    )


def engine_unhealthy(bench: Bench) -> JobStatus:
    handle = begin(bench, unhealthy_timeout=2)
    return ends_alone(
        bench,
        handle,
        "EngineError: the engine is ended: GET /health has answered 500 for 2 s.",
        lambda pid: ask(handle, 0, "POST", "/health", 500),
    )


def engine_stalls(bench: Bench) -> JobStatus:
    """The call that waits is the request without a token."""
    return ends_alone(
        bench,
        begin(bench, vllm(bench.folder), stall_timeout=3),
        "EngineError: the engine is ended: 1 request is open, and it has made no token for 3 s.",
        lambda pid: None,
    )


def vllm(folder: Path) -> str:
    """Return the command of a program that is taken for vLLM."""
    program = folder / "vllm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {PROGRAMS}/engine_server.py "$@"\n')
    program.chmod(0o755)
    return f"{program} serve my/model --port {{port}}"


def engine_out_of_memory(bench: Bench) -> JobStatus:
    """The daemons and workers of the node share the control group, as in a container."""
    with memory_group(MEMORY_BYTES) as group:
        agent = psutil.Process(bench.cluster.agent_pids[0])
        for each in (agent, *agent.children(recursive=True)):
            (group / "cgroup.procs").write_text(str(each.pid))
        try:
            for how, end in (("memory-of-child", "exited with code 3"), ("memory", "killed by SIGKILL")):
                handle = begin(bench, f"{SERVER} --as {how} --first {bench.folder / how}", total=1)
                serving(bench, handle, 1)
                assert f"({end}); memory ran out: the kernel counted an out-of-memory kill" in bench.story(handle)
                status = bench.ends_well(handle)
                (bench.folder / "end").unlink()
        finally:
            bench.cluster.stop()  # the group has to be empty
        return status


def engine_port_taken(bench: Bench) -> JobStatus:
    """A program that sets SO_REUSEADDR listens on the port between two incarnations of the engine."""
    handle = begin(bench)
    serving(bench, handle, 0, 0)
    other = ask(handle, 1, "GET", "/pid")
    port = int(ask(handle, 0, "GET", "/headers?Host").rpartition(":")[2])
    engine = ask(handle, 0, "GET", "/pid")
    with socket.socket() as taker:
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        os.kill(engine, signal.SIGKILL)

        def is_taken() -> bool:
            with contextlib.suppress(OSError):
                taker.bind(("127.0.0.1", port))
                return True
            return False

        eventually(is_taken, timeout=WITHIN_S)
        taker.listen()
        said = f"EngineError: port {port} is taken: another program of node-1 listens on it."
        eventually(lambda: engines(handle)[0].incarnation >= 3, timeout=WITHIN_S, message="a taken port ended the job")
    assert said in bench.story(handle)
    eventually(lambda: engines(handle)[0].state is WorkerState.SERVING, timeout=WITHIN_S)
    assert ask(handle, 1, "GET", "/pid") == other
    return bench.ends_well(handle)


SHARED: dict[str, Check] = {
    "engine-killed": engine_killed,
    "engine-silent": engine_silent,
    "engine-unhealthy": engine_unhealthy,
    "engine-stalls": engine_stalls,
    "engine-port-taken": engine_port_taken,
}
OWN: dict[str, Check] = {"engine-out-of-memory": engine_out_of_memory}
"""Rows with a cluster of their own."""
ROWS = (*SHARED, *OWN)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unified.client.embedded.Daemon", LightDaemon)
        patch.syspath_prepend(str(PROGRAMS))
        cluster = LocalCluster(1, 4, home=tmp_path_factory.mktemp("engines") / "cluster").start()
        yield cluster
        assert cluster.stop() == []


@pytest.mark.parametrize("row", SHARED)
def test_a_failure_of_an_engine(row: str, shared: LocalCluster, programs: None, tmp_path: Path) -> None:  # noqa: F811
    check(row, SHARED[row], Bench(tmp_path, shared))


@pytest.mark.parametrize("row", OWN)
def test_a_failure_of_an_engine_beside_daemons(
    row: str,
    local_cluster: Cluster,
    programs: None,  # noqa: F811
    tmp_path: Path,
) -> None:
    check(row, OWN[row], Bench(tmp_path, local_cluster(nodes=1)))


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        (f"{SERVER} --as bad-flag", {}, r"the engine ended after \d+ s \(exited with code 2\), before GET /health"),
        ("no-such-engine {port}", {}, "No such file or directory: 'no-such-engine'"),
        (f"{SERVER} --as silent", {"start_timeout": 1}, NOT_READY),
        ("sleep 600 {port}", {"start_timeout": 1}, NOT_READY),
    ],
    ids=["it ends", "it does not exist", "it does not get ready", "it listens nowhere"],
)
def test_an_engine_that_cannot_start_ends_the_job(
    command: str,
    options: dict[str, Any],
    said: str,
    shared: LocalCluster,
    programs: None,  # noqa: F811
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, shared)
    handle = begin(bench, command, total=1, max_restart=1, restart_backoff=0.1, **options)
    assert handle.wait(WITHIN_S) == 1
    assert re.search(said, handle.status().reason), handle.status().reason
    assert engines(handle)[0].num_failures == 2


CODE = """
from unified import RoleGroup, rpc

class Caller:
    @rpc()
    def urls(self, require, timeout):
        return RoleGroup("judge").urls(require=require, timeout=timeout)

    @rpc()
    def next(self, num, timeout):
        return [RoleGroup("judge").next(timeout=timeout).name for _ in range(num)]

    @rpc()
    def next_of_busy(self, rank, num):
        group = RoleGroup("judge")
        busy = group[rank].call("request", "GET", "/hold")
        found = [group.next().name for _ in range(num)]
        group[rank].call("request", "POST", "/release").result(100)
        return busy.result(100), found
"""


@pytest.fixture
def calls(shared: LocalCluster, project: Project, tmp_path: Path) -> Iterator[Callable[..., JobHandle]]:
    """Submits engines, and a service that calls them."""
    project(engine_calls=CODE)
    handles: list[JobHandle] = []

    def submit(command: str = SERVER, *, env: dict[str, str] | None = None, **options: Any) -> JobHandle:
        builder: Any = DLJobBuilder().node_num(1).device_per_node(4).device_type("CPU")
        builder = builder.workload("caller", "engine_calls.Caller").resource(cpu=0.1).service()
        builder = builder.role("judge").engine(command).total(2).resource(cpu=0.1).env(env or {})
        handles.append(shared.submit(builder.build(), f"{tmp_path.name}-{len(handles)}", **options))
        return handles[-1]

    yield submit
    for handle in handles:
        handle.stop(force=True)
        handle.wait(WITHIN_S)


def all_serve(handle: JobHandle) -> None:
    eventually(lambda: {worker.state for worker in engines(handle)} == {WorkerState.SERVING}, timeout=WITHIN_S)


def caller(handle: JobHandle, method: str, *arguments: Any) -> Any:
    return handle.call("caller-0", method, *arguments).result(WITHIN_S)


def pid_at(url: str) -> int:
    with contextlib.closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=WITHIN_S)) as client:
        client.request("GET", "/pid")
        return int(client.getresponse().read())


def noted(folder: Path) -> list[tuple[int, int]]:
    """Return the pids of engines, and of a child of each in a session of its own."""
    return [(int(engine), int(child)) for engine, child in map(str.split, lines(folder, "pids"))]


def test_only_engines_that_are_ready_are_used(calls: Callable[..., JobHandle], tmp_path: Path) -> None:
    handle = calls(f"{SERVER} --note {tmp_path} --as silent --first {tmp_path / 'first'}")
    (url,) = caller(handle, "urls", 1, WITHIN_S)
    ready = pid_at(url)
    (first,) = caller(handle, "next", 1, WITHIN_S)  # states in the status may be older
    other = next(worker for worker in engines(handle) if worker.name == first)
    (late,) = (worker for worker in engines(handle) if worker.name != first)
    with pytest.raises(EngineError, match=rf"after 0.3 s 1 of 2 engines are ready; not ready: {late.name}\."):
        caller(handle, "urls", 2, missed(0.3))
    assert caller(handle, "next", 4, WITHIN_S) == [other.name] * 4
    (silent,) = (engine for engine, _ in eventually(lambda: noted(tmp_path)[1:] and noted(tmp_path)) if engine != ready)
    os.kill(silent, signal.SIGKILL)  # its next start is an ordinary one
    both = caller(handle, "urls", 2, WITHIN_S)
    assert len(set(both)) == 2
    assert url in both
    assert sorted(caller(handle, "next", 4, WITHIN_S)) == sorted([late.name, other.name] * 2)


def test_an_engine_has_its_address_again(calls: Callable[..., JobHandle]) -> None:
    handle = calls()
    urls = caller(handle, "urls", 2, WITHIN_S)
    first = pid_at(urls[0])
    os.kill(first, signal.SIGKILL)
    eventually(lambda: engines(handle)[0].incarnation == 1, timeout=WITHIN_S)
    assert caller(handle, "urls", 2, WITHIN_S) == urls
    assert pid_at(urls[0]) != first


def test_the_engine_with_the_fewest_open_calls_is_next(calls: Callable[..., JobHandle]) -> None:
    handle = calls()
    all_serve(handle)
    for rank, other in ((0, 1), (1, 0)):
        assert caller(handle, "next_of_busy", rank, 5) == ("released", [handle.group("judge")[other].name] * 5)


def test_a_request_is_passed_on_with_its_answer(calls: Callable[..., JobHandle]) -> None:
    handle = calls(env={"PORTS": "{port}-{port1}"})
    all_serve(handle)
    bodies: list[Any] = [{"text": "ü", "n": [1, None]}, [], "a", b"\0\xff", b""]
    for body in bodies:
        assert ask(handle, 0, "POST", "/echo", body) == body
    assert ask(handle, 0, "GET", "/headers?X-Run", headers={"X-Run": "7"}) == "7"
    assert ask(handle, 0, "POST", "/health", 200) == b"", "an answer of JSON without a body"
    with pytest.raises(EngineError, match="GET /nope of judge_2-0_1-0 was answered with 404: no such route"):
        ask(handle, 0, "GET", "/nope")
    with pytest.raises(
        EngineError, match=r"the engine of judge_2-0_1-0 did not answer GET /hold: no answer within 0\.3 s"
    ):
        ask(handle, 0, "GET", "/hold", timeout=missed(0.3))
    first, second = ask(handle, 0, "GET", "/env?PORTS").split("-")
    assert ask(handle, 0, "GET", "/headers?Host") == f"127.0.0.1:{first}"
    assert second not in (first, ask(handle, 1, "GET", "/env?PORTS").partition("-")[0])
    assert [worker.incarnation for worker in engines(handle)] == [0, 0]


SLOW = """
import atexit, time
from unified.engine.worker import EngineWorker

class SlowToEnd(EngineWorker):
    def __init__(self):
        atexit.register(time.sleep, 3)
        super().__init__()
"""


def test_a_call_fails_with_its_worker_though_its_connection_breaks_earlier(
    shared: LocalCluster, project: Project
) -> None:
    project(slow_engine=SLOW)
    builder = DLJobBuilder().device_type("CPU").role("judge").engine(SERVER).resource(cpu=0.1)
    spec = to_spec(JobConfig(job_name="slow", dl_config=builder.build()))
    entry_point = replace(spec.roles[0].entry_point, target="slow_engine", attribute="SlowToEnd")
    handle = shared.submit(replace(spec, roles=[replace(spec.roles[0], entry_point=entry_point)]))
    all_serve(handle)
    pid = ask(handle, 0, "GET", "/pid")
    call = handle.group("judge")[0].call("request", "GET", "/hold")
    eventually(lambda: connections(pid), timeout=WITHIN_S)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="killed by SIGKILL"):
        call.result(WITHIN_S)
    handle.stop(force=True)
    handle.wait(WITHIN_S)


def test_a_stop_ends_engines_in_order(calls: Callable[..., JobHandle], tmp_path: Path) -> None:
    handle = calls(f"{SERVER} --note {tmp_path}")
    all_serve(handle)
    call = handle.group("judge")[0].call("request", "GET", "/hold")
    eventually(lambda: connections(ask(handle, 0, "GET", "/pid")), timeout=WITHIN_S)
    handle.stop()
    with pytest.raises((WorkerDiedError, RefusedError)):  # the job may end first
        call.result(WITHIN_S)
    handle.wait(WITHIN_S)
    assert not [line for line in handle.logs() if "cut short" in line], "it waited for the call that it had passed on"
    assert {file.name for file in tmp_path.glob("orderly-*")} == {f"orderly-{engine}" for engine, _ in noted(tmp_path)}
    assert_gone(noted(tmp_path))


def test_a_stop_before_an_engine_is_ready_ends_it_in_order(calls: Callable[..., JobHandle], tmp_path: Path) -> None:
    handle = calls(f"{SERVER} --note {tmp_path} --as silent")
    eventually(lambda: len(noted(tmp_path)) == 2, timeout=WITHIN_S)
    handle.stop()
    handle.wait(WITHIN_S)
    assert len(list(tmp_path.glob("orderly-*"))) == 2
    assert_gone(noted(tmp_path))
    assert not [line for line in handle.logs() if "EngineError" in line], "a stop is no failure"


def test_an_engine_that_ignores_a_stop_is_killed_in_its_grace_period(
    calls: Callable[..., JobHandle], tmp_path: Path
) -> None:
    handle = calls(f"{SERVER} --note {tmp_path} --as stubborn", stop_grace_s=3.0)
    all_serve(handle)
    handle.stop()
    eventually(lambda: len(list(tmp_path.glob("refused-*"))) == 2, timeout=WITHIN_S)
    with contextlib.suppress(WorkerDiedError, RefusedError):  # on a busy machine it has been killed by now
        assert ask(handle, 0, "GET", "/pid") in dict(noted(tmp_path)), "it answers as long as it lives"
    handle.wait(WITHIN_S)
    assert_gone(noted(tmp_path))
    assert not [line for line in handle.logs() if "cut short" in line], "no time was left for the worker's own end"


def assert_gone(pairs: list[tuple[int, int]]) -> None:
    pids = [pid for pair in pairs for pid in pair]
    assert pids
    eventually(lambda: not any(map(process.is_alive, pids)), timeout=WITHIN_S, message=f"of {pids} some live")


WAYS: dict[str, Callable[[LocalCluster, int, int], object]] = {
    "its worker is killed": lambda cluster, worker, engine: os.kill(worker, signal.SIGKILL),
    "its agent is killed": lambda cluster, worker, engine: cluster.kill_agent(0),
    "it is killed": lambda cluster, worker, engine: os.kill(engine, signal.SIGKILL),
    "it is stopped": lambda cluster, worker, engine: os.kill(engine, signal.SIGSTOP),
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_an_engine_is_left(
    way: str,
    local_cluster: Cluster,
    programs: None,  # noqa: F811
    tmp_path: Path,
) -> None:
    cluster = local_cluster(nodes=1)
    bench = Bench(tmp_path, cluster)
    handle = begin(bench, f"{SERVER} --note {tmp_path}", total=1, unhealthy_timeout=1.0)
    serving(bench, handle, 0)
    pairs = noted(tmp_path)
    WAYS[way](cluster, engines(handle)[0].pid, pairs[0][0])
    assert_gone(pairs)
    if way == "its agent is killed":  # its lease keeper, which tells of that, ends then
        eventually(lambda: any(node.state is NodeState.LOST for node in cluster.nodes), timeout=WITHIN_S)
    bench.end()


@pytest.mark.parametrize("way", ["it is killed", "it is stopped"])
def test_shared_memory_of_an_engine_whose_processes_end_with_it_is_removed(
    way: str,
    local_cluster: Cluster,
    programs: None,  # noqa: F811
    tmp_path: Path,
) -> None:
    cluster = local_cluster(nodes=1)
    bench = Bench(tmp_path, cluster)
    handle = begin(bench, f"{SERVER} --note {tmp_path} --share {tmp_path / 'share'}", total=1, unhealthy_timeout=1.0)
    serving(bench, handle, 0)
    first, _ = noted(tmp_path)[0]
    memory = Path("/dev/shm", (tmp_path / "share").read_text())
    assert memory.exists()
    try:
        WAYS[way](cluster, engines(handle)[0].pid, first)
        serving(bench, handle, 1)
        assert not memory.exists()
        bench.end()
    finally:
        memory.unlink(missing_ok=True)
