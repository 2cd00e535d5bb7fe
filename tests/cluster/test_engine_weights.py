"""Versions of a model go into engines: a stand-in for vLLM reads them from shared memory as its backend does."""

import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import PROGRAMS, Cluster, Project
from unified.api.builder import DLJobBuilder
from unified.client.handle import JobHandle

pytestmark = pytest.mark.processes

MODULE = """
import os, pathlib, signal, time
import torch
from unified import RoleGroup, current_worker
from unified.errors import WeightsError

CALLS = ["/pause?mode=keep", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(1000, 300)
        self.norm = torch.nn.LayerNorm(3)  # too small for shared memory of its own
        self.head = torch.nn.Linear(300, 1000, bias=False)
        self.head.weight = self.embedding.weight


def sync(rollout, model, value, **options):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return rollout.sync_weights(model, **options)


def ask(actor, path, **options):
    return actor.call("request", "GET", path, **options).result(60)


def check(actor, version, value):
    found = [ask(actor, f"/value?{name}") for name in ("embedding.weight", "norm.bias", "head.weight")]
    assert (ask(actor, "/weight_info"), found) == (str(version), [value] * 3), found


def train():
    rollout, model = RoleGroup("rollout"), Model()
    rollout.urls(require=2)
    for value in (1.0, 2.0):
        version = sync(rollout, model, value, require=2)
        for actor in rollout:
            check(actor, version, value)
    assert ask(rollout[0], "/calls") == ["/init_weight_transfer_engine", *CALLS, *CALLS]
    mode, plugin = ask(rollout[0], "/env")
    assert mode == "1" and pathlib.Path(plugin, "unified_vllm.py").exists(), plugin
    assert ask(rollout[0], "/config") == '{"backend": "unified"}'

    pid = ask(rollout[1], "/pid")
    os.kill(pid, signal.SIGKILL)  # the next engine has the newest version before anybody can ask it
    while True:
        try:
            if ask(rollout[1], "/pid") != pid:
                break
        except Exception as error:
            print("not yet:", error)
    check(rollout[1], version, 2.0)

    assert sync(rollout, model, 2.5, version=version) == version  # the same number again
    for actor in rollout:
        check(actor, version, 2.5)

    for value, how in ((3.0, "/break"), (4.0, "/freeze")):
        rollout[0].call("request", "POST", how).result(60)
        version = sync(rollout, model, value)
        assert rollout.synced.receivers == (rollout[1].name,), rollout.synced
        check(rollout[1], version, value)
        rollout.urls(require=2)
        check(rollout[0], version, value)  # a new process, which got the version from the other worker


def refuse():
    RoleGroup("rollout").urls()
    try:
        RoleGroup("rollout").sync_weights(Model())
    except WeightsError as error:
        print(error)
    else:
        raise AssertionError("weights went into an engine that takes none")
"""


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """A program and a package with the names of vLLM's."""
    program = tmp_path / "bin/vllm"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{(PROGRAMS / 'fake_vllm.py').read_text()}")
    program.chmod(0o755)
    (tmp_path / "lib/vllm").mkdir(parents=True)
    (tmp_path / "lib/vllm/__init__.py").touch()
    return program


def submitted(cluster: Cluster, vllm: Path, entry: str, version: str, total: int, arguments: str = "") -> JobHandle:
    package = vllm.parents[1] / "lib"
    (package / "vllm/_version.py").write_text(f"__version__ = version = {version!r}\n")
    builder = DLJobBuilder().device_type("CPU")
    builder.workload("trainer", f"engine_weights_job.{entry}")
    command = f"{vllm} serve a/model --port {{port}} {arguments}"
    engine = builder.role("rollout").engine(command, unhealthy_timeout=3).total(total)
    engine.env({"PYTHONPATH": str(package)})
    return cluster().submit(builder.build(), "rl")


def test_versions_are_in_the_engines_when_a_sync_returns(local_cluster: Cluster, project: Project, vllm: Path) -> None:
    project(engine_weights_job=MODULE)
    handle = submitted(local_cluster, vllm, "train", "0.32.0+cpu", 2)
    assert handle.wait(timeout=200) == 0, handle.status().end


@pytest.mark.parametrize(
    ("version", "arguments", "reason"),
    [
        ("0.27.1", "", "vLLM 0.27.1 takes no weights: 0.28 or newer does"),
        ("0.32.0", "--weight-transfer-config {}", "its command has a --weight-transfer-config of its own"),
        ("0.32.0", "--host 0.0.0.0", "other hosts reach it, so VLLM_SERVER_DEV_MODE, which anybody may call, is left"),
    ],
)
def test_an_engine_that_takes_no_weights_says_why(
    local_cluster: Cluster, project: Project, vllm: Path, version: str, arguments: str, reason: str
) -> None:
    project(engine_weights_job=MODULE)
    handle = submitted(local_cluster, vllm, "refuse", version, 1, arguments)
    assert handle.wait(timeout=200) == 0, handle.status().end
    said = "\n".join(handle.logs())
    assert f"the engine of rollout_1-0_1-0 takes no weights: {reason}" in said
