"""A rollout worker that is killed holds up no sync, and answers no call before it has the newest weights."""

import os
import signal
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster, Project
from unified.api.builder import DLJobBuilder
from unified.client.report import weights_lines
from unified.testing import eventually

pytestmark = pytest.mark.processes

MODULE = """
import pathlib, time
import torch
from unified import RoleGroup, WeightsReceiver, current_worker, rpc


class Rollout:
    def __init__(self):
        folder = pathlib.Path(current_worker().job_info.user_config.folder)
        while current_worker().incarnation and not (folder / "come-back").exists():
            time.sleep(0.01)
        self.receiver = WeightsReceiver()
        self.at_start = self.receiver.version

    @rpc
    def versions(self):
        return self.at_start, self.receiver.version


def train():
    folder = pathlib.Path(current_worker().job_info.user_config.folder)
    rollout = RoleGroup("rollout")
    model = torch.nn.Linear(8, 8)
    assert rollout.sync_weights(model, require=2) == 1
    assert rollout.synced.left_out == {}
    (folder / "first").touch()
    while True:  # until the other one is known to be dead
        version = rollout.sync_weights(model)
        if rollout.synced.left_out:
            break
    assert rollout.synced.receivers == (rollout[0].name,), rollout.synced
    (dead, why), = rollout.synced.left_out.items()
    assert dead == rollout[1].name, rollout.synced
    newest = rollout.sync_weights(model)
    assert newest == version + 1 and rollout.synced.receivers == (rollout[0].name,)
    (folder / "new").write_text(why)
    (folder / "new").rename(folder / "why")
    (folder / "come-back").touch()
    assert rollout[1].call("versions").result(60) == (newest, newest)
    newest = rollout.sync_weights(model)
    assert rollout.synced.receivers == (rollout[0].name, rollout[1].name)
    (folder / "new").write_text(str(newest))
    (folder / "new").rename(folder / "done")
    while not (folder / "stop").exists():
        time.sleep(0.05)
"""


def test_a_killed_receiver_holds_up_nothing(local_cluster: Cluster, project: Project, tmp_path: Path) -> None:
    project(left_out_job=MODULE)
    builder = DLJobBuilder().device_type("CPU").config({"folder": str(tmp_path)})
    builder.workload("trainer", "left_out_job.train")
    builder.workload("rollout", "left_out_job.Rollout").total(2).restart_alone()
    cluster = local_cluster()
    handle = cluster.submit(builder.build(), "rl")
    eventually((tmp_path / "first").exists, timeout=100, message="no sync")
    pids = cluster.workers(handle)
    name = next(each for each in pids if each.startswith("rollout_2-1"))
    os.kill(pids[name], signal.SIGKILL)
    eventually((tmp_path / "why").exists, timeout=100, message="no sync without the dead one")
    why = (tmp_path / "why").read_text()
    assert "killed by SIGKILL" in why or "there is no WeightsReceiver('default') there" in why
    eventually((tmp_path / "done").exists, timeout=100, message="no sync with both")
    newest = (tmp_path / "done").read_text()
    expected = f"default: version {newest}: rollout-0, rollout-1"
    eventually(lambda: expected in "".join(weights_lines(handle.status())), timeout=100, message=expected)
    (tmp_path / "stop").touch()
    assert handle.wait(timeout=100) == 0, handle.status().end
