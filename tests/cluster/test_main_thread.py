"""Services whose methods run in the main thread, which has made their object: `@rpc(thread="main")`."""

import os
import signal
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster, Project, lines
from unified.api.builder import DLJobBuilder
from unified.cli.main import main
from unified.client.handle import JobHandle
from unified.errors import RpcError, WorkerDiedError
from unified.protocol.records import Stage
from unified.testing import LocalCluster, eventually

pytestmark = pytest.mark.processes

CODE = """
import asyncio, atexit, decimal, os, signal, sqlite3, threading, time
from unified import RoleGroup, current_worker, rpc

class TooLong(Exception):
    pass

def ring(number, frame):
    raise TooLong()

def note(text):
    with open(os.path.join(os.environ["NOTES"], "notes"), "a") as file:
        print(text, file=file)

@rpc(thread="main")
class Judge:
    def __init__(self):
        self.table = sqlite3.connect(":memory:")
        self.local = threading.local()
        self.local.x = 17
        decimal.getcontext().prec = 3
        if os.environ.get("WITH_TORCH"):
            import torch
            torch.set_grad_enabled(False)
            torch.set_default_device("meta")

    @rpc()
    def facts(self):
        asyncio.get_event_loop_policy().get_event_loop().run_until_complete(asyncio.sleep(0))
        is_main = threading.current_thread() is threading.main_thread()
        return is_main, self.table.execute("select 1 + 1").fetchone()[0], self.local.x, str(decimal.Decimal(1) / 3)

    @rpc()
    def torch_facts(self):
        import torch
        return torch.is_grad_enabled(), str(torch.zeros(1).device)

    @rpc()
    def verify(self, seconds):
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            time.sleep(600)
        except TooLong:
            return "too long"

    @rpc()
    def soon(self, seconds):
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        return True

    @rpc()
    def name(self):
        return "judge"

    @rpc()
    def ask_myself(self):
        return RoleGroup("judge")[0].call("name").result()

    @rpc()
    def ask_player(self):
        return RoleGroup("player")[0].call("ask_judge").result()

    @rpc(thread="any")
    async def alive(self):
        return True

class Player:
    @rpc()
    def ask_judge(self):
        return RoleGroup("judge")[0].call("name").result()

class Exits:
    def __init__(self):
        signal.signal(signal.SIGTERM, lambda *_: exit(5))

    @rpc()
    def pid(self):
        return os.getpid()

class Stopped:
    def __init__(self):
        atexit.register(note, "atexit")

    @rpc(thread="main")
    def sleep(self):
        note("begun")
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            note("interrupted")
            raise
        finally:
            note("finally")

    @rpc(thread="main")
    def generate(self):
        try:
            while True:
                note("begun")
                yield 1
        finally:
            note("finally")

    @rpc(thread="main")
    def patient(self):
        note("begun")
        while not current_worker().should_stop:
            time.sleep(0.01)
        time.sleep(0.1)
        note("patient")
        return "done"

class Busy:
    @rpc(thread="main")
    def ask(self):
        return 1

    def run(self):
        pass

@rpc(thread="main")
def ask():
    return 1

def offer():
    pass
"""


@pytest.fixture
def cluster(local_cluster: Cluster, project: Project) -> LocalCluster:
    project(judged=CODE)
    return local_cluster(nodes=1, devices=4)


def submit(cluster: LocalCluster, *roles: str, notes: Path | None = None, **options: object) -> JobHandle:
    builder = DLJobBuilder().node_num(1).device_per_node(4).device_type("CPU")
    builder.global_env({"NOTES": str(notes or ""), **{name: str(value) for name, value in options.items()}})
    for role in roles:
        builder.role(role.lower()).run(f"judged.{role}").resource(cpu=0.1).service().max_restart(0)
    return cluster.submit(builder.build(), "judged", stop_grace_s=100)


@pytest.mark.usefixtures("without_torch")
def test_state_of_the_thread_that_made_the_object_is_there(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with submit(cluster, "Judge", "Player") as handle:
        assert handle.call("judge-0", "facts").result(100) == (True, 2, 17, "0.333")
        assert handle.call("judge-0", "verify", 0.1).result(100) == "too long"
        refused = (
            r"the call of 'name' in worker judge_1-0_1-0 was refused: calls of the main thread wait for one another"
        )
        for method in ("ask_myself", "ask_player"):
            with pytest.raises(RpcError, match=refused):
                handle.call("judge-0", method).result(100)
        call = handle.call("judge-0", "verify", 600)
        eventually(lambda: handle.call("judge-0", "alive").result(100), timeout=100)
        capsys.readouterr()

        def stack() -> str:
            assert main(["stack", handle.job_id, "--master", handle.connection.address]) == 0
            return capsys.readouterr().out

        assert eventually(lambda: "in verify" in stack(), timeout=100)
        call.cancel()


def test_settings_of_torch_are_in_force(cluster: LocalCluster) -> None:
    with submit(cluster, "Judge", WITH_TORCH=1) as handle:
        assert handle.call("judge-0", "torch_facts").result(100) == (False, "meta")


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    ("method", "by_ctrl_c", "said"),
    [
        ("sleep", False, ["interrupted", "finally"]),
        ("sleep", True, ["interrupted", "finally"]),
        ("patient", False, ["patient"]),
    ],
)
def test_stop_interrupts_the_call_that_runs_unless_it_asks_for_time(
    cluster: LocalCluster, tmp_path: Path, method: str, by_ctrl_c: bool, said: list[str]
) -> None:
    with submit(cluster, "Stopped", notes=tmp_path) as handle:
        call = handle.call("stopped-0", method)
        queued = handle.call("stopped-0", method)
        assert eventually(lambda: lines(tmp_path, "notes"), timeout=100)
        if by_ctrl_c:  # as it comes to each process of the terminal
            os.kill(next(iter(cluster.workers(handle).values())), signal.SIGINT)
        else:
            handle.restart("stopped-0")
        with pytest.raises(WorkerDiedError):
            queued.result(100)
        if method == "patient":
            assert call.result(100) == "done"
        else:
            with pytest.raises(WorkerDiedError):
                call.result(100)
        assert lines(tmp_path, "notes") == ["begun", *said, "atexit"]
        assert not [line for line in handle.logs() if "Traceback" in line]


@pytest.mark.usefixtures("without_torch")
def test_stream_that_waits_for_its_reader_is_closed_by_a_stop(cluster: LocalCluster, tmp_path: Path) -> None:
    with submit(cluster, "Stopped", notes=tmp_path) as handle:
        stream = handle.call("stopped-0", "generate").result(100)
        assert next(stream) == 1
        assert eventually(lambda: len(lines(tmp_path, "notes")) >= 16, timeout=100)
        handle.stop()
        assert handle.wait(100) == 130
        assert lines(tmp_path, "notes")[-2:] == ["finally", "atexit"]


@pytest.mark.usefixtures("without_torch")
def test_signal_that_comes_when_its_method_has_returned_costs_no_call(cluster: LocalCluster) -> None:
    with submit(cluster, "Judge") as handle:
        calls = [handle.call("judge-0", "soon", 1e-5 * (1 + number % 40)) for number in range(400)]
        errors = [call.exception(100) for call in calls]
        assert {type(error).__name__ for error in errors} <= {"NoneType", "RemoteTooLong"}, "it came within the method"
        assert handle.call("judge-0", "verify", 0.1).result(100) == "too long"


@pytest.mark.usefixtures("without_torch")
def test_handler_of_sigterm_that_exits_ends_a_service(cluster: LocalCluster) -> None:
    with submit(cluster, "Exits") as handle:
        os.kill(handle.call("exits-0", "pid").result(100), signal.SIGTERM)
        assert handle.wait(100) != 0


@pytest.mark.usefixtures("without_torch")
def test_worker_whose_main_thread_is_taken_says_so(cluster: LocalCluster) -> None:
    with submit(cluster, "Busy") as handle:
        assert handle.wait(100) == 1
        assert "'judged.Busy' has a run() method, which takes the main thread" in handle.status().reason
    with submit(cluster, "offer") as handle:
        with pytest.raises(RpcError, match=r"'ask' is .* the main thread of worker offer_1-0_1-0"):
            handle.call("offer-0", "ask").result(100)
        assert handle.status().stage is Stage.RUNNING
