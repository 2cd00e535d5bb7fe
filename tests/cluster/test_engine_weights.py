"""Versions of a model go into engines: stand-ins for vLLM and SGLang read them from memory as these do."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import PROGRAMS, Cluster, Project
from unified.api.builder import DLJobBuilder
from unified.client.handle import JobHandle

pytestmark = pytest.mark.processes

CONFIG = '--weight-transfer-config \'{"backend": "nccl"}\''

MODULE = """
import base64, os, pathlib, pickle, signal
import torch
from unified import RoleGroup
from unified.errors import EngineError, WeightsError

WEIGHT_CALLS = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
CALLS = ["/init_weight_transfer_engine", "/pause?mode=keep", *WEIGHT_CALLS, "/resume"]


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


def kill(actor):
    pid = ask(actor, "/pid")
    os.kill(pid, signal.SIGKILL)  # the next engine has the newest version before anybody can ask it
    while True:
        try:
            if ask(actor, "/pid") != pid:
                break
        except Exception as error:
            print("not yet:", error)


def train():
    rollout, model = RoleGroup("rollout"), Model()
    rollout.urls(require=2)
    for value in (1.0, 2.0):
        version = sync(rollout, model, value, require=2)
        for actor in rollout:
            check(actor, version, value)
    assert ask(rollout[0], "/calls") == [*CALLS, *CALLS]
    mode, plugin = ask(rollout[0], "/env")
    assert mode == "1" and pathlib.Path(plugin, "unified_vllm.py").exists(), plugin
    assert ask(rollout[0], "/config") == '{"backend": "unified"}'

    kill(rollout[1])
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


class Mixed(torch.nn.Module):  # sizes that leave others unaligned if these come first
    def __init__(self):
        super().__init__()
        self.mask = torch.nn.Parameter(torch.ones(3, dtype=torch.bool), requires_grad=False)
        self.one = torch.nn.Parameter(torch.ones(5).to(torch.float8_e5m2), requires_grad=False)
        self.two = torch.nn.Parameter(torch.ones(3, 3, dtype=torch.bfloat16))
        self.model = Model()
        self.steps = torch.nn.Parameter(torch.ones((), dtype=torch.int64), requires_grad=False)


def check_sglang(actor, version, value):
    assert ask(actor, "/model_info")["weight_version"] == str(version)
    assert ask(actor, "/names") == [f"model.{name}" for name in ("embedding.weight", "norm.bias", "norm.weight")]
    for name in ask(actor, "/names"):
        assert ask(actor, f"/value?{name}") == value, name
    assert not ask(actor, "/exists"), "the folder is left"


def train_sglang():
    rollout, model = RoleGroup("rollout"), Mixed()
    rollout.urls(require=2)
    assert ask(rollout[0], "/argv")[-2:] == ["--host", "127.0.0.1"]
    pids = [ask(actor, "/pid") for actor in rollout]
    for value, how in ((1.0, ""), (2.0, "/slow")):  # its ready route answers 503 until it has loaded
        if how:
            rollout[0].call("request", "POST", how).result(60)
        version = sync(rollout, model, value, require=2)
        assert [ask(actor, "/pid") for actor in rollout] == pids
        for actor in rollout:
            check_sglang(actor, version, value)
    kill(rollout[1])
    check_sglang(rollout[1], version, 2.0)
    rollout[0].call("request", "POST", "/break").result(60)
    version = sync(rollout, model, 3.0)
    assert rollout.synced.receivers == (rollout[1].name,), rollout.synced
    rollout.urls(require=2)
    check_sglang(rollout[0], version, 3.0)


def send_as_vllm():
    from unified.engine.vllm_client import VLLMWeightSyncClient

    rollout = RoleGroup("rollout")
    rollout.urls(require=2)
    client = VLLMWeightSyncClient(rollout)
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 5, "master_port": 7})
    client.start_weight_update()
    client.update_weights({"names": ["a"], "ipc_handles": {"gpu": (1, b"2")}, "ipc_handles_pickled": None})
    client.update_weights([{"names": ["b"]}, {"names": ["c"]}])
    client.finish_weight_update("seven")
    client.finish_weight_update()
    ends = 2 * ["/update_weights"] + 2 * ["/finish_weight_update"]
    paths = ["/init_weight_transfer_engine", "/start_weight_update", *ends]
    for rank, actor in enumerate(rollout):
        assert ask(actor, "/calls") == paths
        init, start, handles, several, finish, finish_again = ask(actor, "/bodies")
        assert init == {"init_info": {"rank_offset": 1 + 2 * rank, "world_size": 5, "master_port": 7}}
        pickled = handles["update_info"].pop("ipc_handles_pickled")
        assert pickle.loads(base64.b64decode(pickled)) == {"gpu": (1, b"2")}
        assert handles["update_info"] == {"names": ["a"]}
        assert several == {"update_info": [{"names": ["b"]}, {"names": ["c"]}]}
        assert (start, finish, finish_again) == (None, {"weight_version": "seven"}, None)
        assert ask(actor, "/env")[0] == "1", "its routes for weights are closed"
    rollout[1].call("request", "POST", "/break").result(60)
    try:
        client.update_weights({})
    except EngineError as error:
        assert f"POST /update_weights of {rollout[1].name} was answered with 500" in str(error), error
    else:
        raise AssertionError("an engine has refused the weights")


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
def program(tmp_path: Path) -> Callable[[str], Path]:
    """Make a stand-in for an engine, under its name."""

    def make(name: str) -> Path:
        found = tmp_path / name
        found.write_text(f"#!{sys.executable}\n{(PROGRAMS / f'fake_{name}.py').read_text()}")
        found.chmod(0o755)
        return found

    return make


def submitted(cluster: Cluster, engine: Path, entry: str, total: int, arguments: str = "", **options: Any) -> JobHandle:
    builder = DLJobBuilder().device_type("CPU")
    builder.workload("trainer", f"engine_weights_job.{entry}").max_restart(1)
    command = f"{engine} serve a/model --port {{port}} {arguments}"
    builder.role("rollout").engine(command, unhealthy_timeout=3).total(total).max_restart(3)
    return cluster().submit(builder.build(), "rl", **options)


@pytest.mark.parametrize(
    ("engine", "entry", "arguments"),
    [("vllm", "train", ""), ("sglang", "train_sglang", ""), ("vllm", "send_as_vllm", CONFIG)],
    ids=["vllm", "sglang", "vLLM's client"],
)
def test_versions_are_in_the_engines_when_a_sync_returns(
    engine: str,
    entry: str,
    arguments: str,
    local_cluster: Cluster,
    project: Project,
    program: Callable[[str], Path],
) -> None:
    project(engine_weights_job=MODULE)
    handle = submitted(local_cluster, program(engine), entry, 2, arguments)
    assert handle.wait(timeout=200) == 0, handle.status().end


@pytest.mark.parametrize(
    ("engine", "arguments", "reason"),
    [
        ("vllm", CONFIG, "its command has a --weight-transfer-config of its own"),
        ("vllm", "--host 0.0.0.0", "other hosts reach it, so VLLM_SERVER_DEV_MODE, which anybody may call, is left"),
        ("vllm", "--host=::", "other hosts reach it, so VLLM_SERVER_DEV_MODE, which anybody may call, is left"),
        ("sglang", "--api-key=secret", "its routes for weights need its API key"),
    ],
)
def test_an_engine_that_takes_no_weights_says_why(
    local_cluster: Cluster, project: Project, program: Callable[[str], Path], engine: str, arguments: str, reason: str
) -> None:
    project(engine_weights_job=MODULE)
    handle = submitted(local_cluster, program(engine), "refuse", 1, arguments)
    assert handle.wait(timeout=200) == 0, handle.status().end
    said = "\n".join(handle.logs())
    assert f"the engine of rollout_1-0_1-0 takes no weights: {reason}" in said


def test_a_vllm_that_is_too_old_says_what_to_do(
    local_cluster: Cluster, project: Project, program: Callable[[str], Path]
) -> None:
    project(engine_weights_job=MODULE)
    handle = submitted(local_cluster, program("vllm"), "refuse", 1, "--old", restart_backoff=0.1)
    assert handle.wait(timeout=200) == 1
    assert "set VLLM_SERVER_DEV_MODE=0 for the role" in handle.status().reason, handle.status().reason
