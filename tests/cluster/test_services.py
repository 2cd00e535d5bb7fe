"""Roles that answer calls until the others are done."""

import os
import signal
from pathlib import Path

import pytest

import unified
from tests.cluster.conftest import Cluster, Project
from tests.support.deadlines import missed
from unified.api.builder import DLJobBuilder
from unified.cli.main import main
from unified.client.handle import JobHandle
from unified.errors import WorkerDiedError
from unified.protocol.records import Stage, WorkerState
from unified.testing import LocalCluster, eventually

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("without_torch")]

CODE = """
import os, threading, time
from unified import current_worker, export_rpc_method, rpc

ended = threading.Event()

class Evaluator:
    @rpc()
    def evaluate(self, step):
        return step * 2

    @rpc()
    def hang(self):
        threading.Event().wait()

class Loads:
    def __init__(self):
        while not os.path.exists(os.environ["LOADED"]):
            time.sleep(0.02)
        self.is_loaded = True

    @rpc()
    def ask(self):
        return self.is_loaded

class Trainer:
    @rpc()
    def end(self):
        ended.set()

    def run(self):
        ended.wait()

def offer():
    export_rpc_method("add", lambda left, right: left + right)
"""


def builder() -> DLJobBuilder:
    return DLJobBuilder().node_num(1).device_per_node(4).device_type("CPU")


def states(handle: JobHandle) -> dict[str, tuple[WorkerState, int]]:
    """State and incarnation of each worker."""
    workers = handle.status().workers
    return {f"{worker.role}-{worker.rank}": (worker.state, worker.incarnation) for worker in workers}


@pytest.fixture
def cluster(local_cluster: Cluster, project: Project) -> LocalCluster:
    project(served=CODE)
    return local_cluster(nodes=1, devices=4)


def test_an_evaluator_serves_restarts_alone_and_ends_with_the_trainer(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    job = builder().workload("trainer", "served.Trainer").resource(cpu=0.1)
    job = job.workload("evaluator", "served.Evaluator").resource(cpu=0.1).total(2)
    job = job.workload("adder", "served.offer").resource(cpu=0.1).service()
    with cluster.submit(job.build(), "evaluated", stop_grace_s=5) as handle:
        assert handle.group("evaluator").call("evaluate", 2).result(100) == [4, 4]
        assert handle.call("adder", "add", 1, 2).result(100) == 3
        served = {
            "trainer-0": (WorkerState.RUNNING, 0),
            "evaluator-0": (WorkerState.SERVING, 0),
            "evaluator-1": (WorkerState.SERVING, 0),
            "adder-0": (WorkerState.SERVING, 0),
        }
        eventually(lambda: states(handle) == served, timeout=100)
        call = handle.call("evaluator-1", "hang")
        os.kill(cluster.workers(handle)[handle.group("evaluator")[1].name], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            call.result(100)
        assert handle.call("evaluator-1", "evaluate", 3).result(100) == 6
        eventually(lambda: states(handle) == {**served, "evaluator-1": (WorkerState.SERVING, 1)}, timeout=100)
        assert main(["status", handle.job_id, "--master", handle.connection.address]) == 0
        assert "2 SERVING" in capsys.readouterr().out
        handle.call("trainer-0", "end").result(100)
        assert handle.wait(100) == 0


@pytest.mark.parametrize("is_driver", [True, False])
def test_a_service_alone_runs_until_it_is_stopped(cluster: LocalCluster, is_driver: bool) -> None:
    role = builder().workload("svc", "served.Evaluator").resource(cpu=0.1)
    with cluster.submit((role if is_driver else role.not_driver()).build(), "alone", stop_grace_s=5) as handle:
        eventually(lambda: states(handle) == {"svc-0": (WorkerState.SERVING, 0)}, timeout=100)
        assert handle.call("svc", "evaluate", 4).result(100) == 8
        assert handle.status().stage is Stage.RUNNING
        with unified.connect(cluster.address) as client:  # whoever may reach the master may stop it
            client.job("alone").stop()
        assert handle.wait(100) == 130


@pytest.mark.smoke
def test_calls_wait_until_a_service_is_ready_also_after_a_restart(cluster: LocalCluster, tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    job = builder().global_env({"LOADED": str(loaded)}).workload("model", "served.Loads").resource(cpu=0.1)
    with cluster.submit(job.build(), "loads", stop_grace_s=5) as handle:
        for incarnation in range(2):
            loading = {"model-0": (WorkerState.RUNNING, incarnation)}
            eventually(lambda expected=loading: states(handle) == expected, timeout=100)  # type: ignore[misc]
            call = handle.call("model", "ask")
            with pytest.raises(TimeoutError):
                call.result(missed(0.3))
            loaded.touch()
            call = handle.call("model", "ask")
            assert call.result(100) is True
            serving = {"model-0": (WorkerState.SERVING, incarnation)}
            eventually(lambda expected=serving: states(handle) == expected, timeout=100)  # type: ignore[misc]
            loaded.unlink()
            os.kill(cluster.workers(handle)[handle.group("model")[0].name], signal.SIGKILL)
