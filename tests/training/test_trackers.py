"""A job whose rank 0 is killed in the middle: TensorBoard, MLflow, W&B and trackio hold each step once."""

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Cluster, Project, project, without_torch  # noqa: F401 - fixtures
from tests.support.tracked_runs import Held, in_mlflow, in_tensorboard, in_trackio, in_wandb
from unified.api.builder import DLJobBuilder
from unified.testing import eventually

for package in ("tensorboard", "mlflow", "wandb", "trackio"):
    pytest.importorskip(package, reason="pip install 'unified-runtime[trackers]'")

STEPS, KILLED_AT, SAVED_EVERY = 200, 126, 10
REDONE = KILLED_AT // SAVED_EVERY * SAVED_EVERY
"""Step of the checkpoint that the second incarnation begins with."""
SERIES = "w_2-0_1-0/0.metrics.jsonl"
CODE = f"""
import os, signal, time
from pathlib import Path
from unified import current_worker

def train():
    me, saved = current_worker(), Path("saved")
    me.report(size=7.0)
    for step in range(int(saved.read_text()) if saved.exists() else 0, {STEPS}):
        me.report(step=step, loss=step / 2 + 1000 * me.incarnation, phase="fit")
        me.report(lr=step * 1e-3)
        if os.environ["RANK"] == "0" and step % {SAVED_EVERY} == {SAVED_EVERY - 1}:
            saved.write_text(str(step + 1))
        if me.incarnation == 0 and step == {KILLED_AT} and os.environ["RANK"] == "0":
            while not Path("die").exists():
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
        while me.incarnation == 1 and os.environ["RANK"] == "0" and step == {STEPS - 2} and not Path("end").exists():
            time.sleep(0.02)
        time.sleep(0.005)
"""


class Folders:
    """What each tracker holds of a name."""

    def __init__(self, base: Path) -> None:
        self._read: dict[str, Callable[[str], Held]] = {
            "tensorboard": lambda name: in_tensorboard(next((base / "tb").glob("tracked-1-*"), base / "none"), name),
            "mlflow": lambda name: in_mlflow(base / "mlruns", name) if (base / "mlruns").exists() else [],
            "wandb": lambda name: in_wandb(base / "wandb", name),
            "trackio": lambda name: in_trackio(base / "trackio", "mine", name),
        }

    def held(self, name: str) -> dict[str, Held]:
        return {tracker: read(name) for tracker, read in self._read.items()}

    def have_all(self, step: int) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            return all(step in dict(held) for held in self.held("lr").values())
        except (sqlite3.OperationalError, MlflowException):  # it is being made, or written
            return False


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("kill", ["when all have most of it", "when the node has it"])
def test_each_step_is_there_once_across_a_restart(
    kill: str,
    local_cluster: Cluster,
    project: Project,  # noqa: F811 - a fixture
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a step done twice, TensorBoard shows the last value, and the others the first."""
    monkeypatch.chdir(tmp_path)
    project(tracked_job=CODE)
    folders = Folders(tmp_path)
    builder: Any = DLJobBuilder().device_per_node(1).node_num(1).device_type("CPU")
    builder = builder.global_env({"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")})
    builder = builder.workload("w", "tracked_job.train").total(2).resource(cpu=0.1).max_restart(1)
    cluster = local_cluster(nodes=1, devices=1)
    handle = cluster.submit(
        builder.build(),
        "tracked",
        failover_exec_strategy=2,
        report_to="tensorboard:tb,mlflow:mlruns,wandb:mine,trackio:mine",
    )
    if kill == "when all have most of it":
        eventually(lambda: folders.have_all(REDONE), timeout=200)
    else:
        eventually(
            lambda: any(f'"step":{KILLED_AT},' in f.read_text() for f in cluster.home.rglob(SERIES)), timeout=200
        )
    Path("die").touch()
    eventually(lambda: folders.have_all(STEPS - 10), timeout=300)  # a busy machine imports them for long
    Path("end").touch()
    assert handle.wait(timeout=300) == 0
    assert [worker.incarnation for worker in handle.status().workers if worker.rank == 0] == [1]

    first = {step: step / 2 + (1000 if step > KILLED_AT else 0) for step in range(STEPS)}
    last = {step: step / 2 + (1000 if step >= REDONE else 0) for step in range(STEPS)}
    for tracker, held in folders.held("loss").items():
        assert [step for step, _ in held] == list(range(STEPS)), tracker
        assert dict(held) == (last if tracker == "tensorboard" else first), tracker
    for tracker, held in folders.held("lr").items():
        assert [step for step, _ in held] == list(range(STEPS)), tracker
        assert [value for _, value in held] == pytest.approx([step * 1e-3 for step in range(STEPS)], abs=1e-7), tracker
    command = [sys.executable, "-m", "unified", "metrics", "tracked", "--tensorboard", "series"]
    subprocess.run([*command, "--master", cluster.address], timeout=200, check=True)
    series = in_tensorboard(tmp_path / "series" / handle.job_id / "w-0", "loss")
    assert [step for step, _ in series] == list(range(STEPS))
    assert dict(series) == last
