"""Launcher command lines as jobs."""

import logging
import os
import re
import sys
from argparse import REMAINDER, ArgumentParser
from typing import Any
from unittest.mock import Mock

import pytest

from unified.api.builder import DLJob, DLJobBuilder, launcher
from unified.api.builder.launcher import num_workers
from unified.api.builder.torchrun import table_parser
from unified.errors import JobError, OptionError
from unified.job import ElasticWorkloadDesc
from unified.job.entrypoint import parse
from unified.job.spec import EntryPoint
from unified.protocol.client_master import NodeStatus
from unified.protocol.records import Device, NodeResources, NodeState


def read(cmd: str) -> DLJob:
    return DLJobBuilder().by_dlrover_run_cmd(cmd).build()


@pytest.fixture(autouse=True)
def _no_torchrun_defaults_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)


def only_role(job: DLJob, name: str = "ELASTIC") -> ElasticWorkloadDesc:
    assert list(job.workloads) == [name]
    workload = job.get_workload(name)
    assert isinstance(workload, ElasticWorkloadDesc)
    return workload


NEWER = [("--log-line-prefix-template", "--log_line_prefix_template")]
"""Options of torch 2.14 that we have as well."""
OF_A_SHELL = ["--print-completion", "--print_completion"]


def test_our_table_is_torchs_parser() -> None:
    pytest.importorskip("torch")
    from torch.distributed.run import get_args_parser

    ours, theirs = table_parser("torchrun", {}), get_args_parser()
    mine = {tuple(action.option_strings): action for action in ours._actions}
    for action in theirs._actions:
        if action.option_strings == OF_A_SHELL:
            continue
        twin = mine.pop(tuple(action.option_strings), None) if action.option_strings else None
        if not action.option_strings:
            twin = next(a for a in ours._actions if a.dest == action.dest)
        assert twin is not None, f"torchrun has {action.option_strings}, and our table has not"
        for field in ("dest", "nargs", "default", "required"):
            assert getattr(twin, field) == getattr(action, field), (action.dest, field)
        assert list(twin.choices or ()) == list(action.choices or ()), action.dest
        if isinstance(action.type, type):
            assert twin.type is action.type, action.dest
    assert set(mine) - {(), *NEWER} == set(), "our table has what torchrun has not"


def test_defaults_come_from_the_environment_as_with_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("PET_MODULE", "1")
    monkeypatch.setenv("PET_MAX_RESTARTS", "2")
    workload = only_role(read("torchrun pkg.train"))
    assert (workload.total, workload.max_restart, workload.entry_point) == (3, 2, "-m pkg.train")


@pytest.mark.parametrize(
    ("cmd", "of_job", "of_role"),
    [
        (
            "dlrover-run --nnodes=1 --nproc_per_node=1 /root/dummy_run.py --test 0",  # of the guide
            {"node_num": 1, "device_per_node": 1},
            {"total": 1, "per_group": 1, "entry_point": "/root/dummy_run.py --test 0"},
        ),
        (
            "torchrun --nnodes=2 --nproc-per-node=4 train.py",
            {"device_type": "GPU", "config": {}, "env": {}, "node_num": 2, "device_per_node": 4},
            {"envs": {}, "total": 8, "comm_auto_setup_process_group": False},
        ),
        (  # two nodes of two devices each, as upstream's own test has it
            "torchrun --nnodes=2 --nproc_per_node=2 x.py",
            {"node_num": 2, "device_per_node": 2, "may_share_nodes": True},
            {"total": 4, "per_group": 2},
        ),
        (
            "torchrun --nproc-per-node=cpu train.py",
            {"device_type": "CPU"},
            {"total": len(os.sched_getaffinity(0))},
        ),
        (
            "dlrover-run --nnodes=1:4 --nproc_per_node=2 train.py",
            {"node_num": 4},
            {"min_nodes": 1, "max_nodes": 4, "total": 8, "per_group": 2},
        ),
        # without --max-restarts nothing is restarted, as with torchrun
        ("torchrun train.py", {}, {"max_restart": 0, "role_max_restart": 0, "comm_run_id": "", "comm_port": 0}),
        ("torchrun --max-restarts=6 train.py", {}, {"max_restart": 6, "role_max_restart": 6}),
        ("dlrover-run --max-restarts=6 train.py", {}, {"max_restart": 6, "role_max_restart": 6}),
        (
            "dlrover-run train.py",
            {},
            {"max_restart": 10, "role_max_restart": None, "comm_auto_setup_process_group": True},
        ),
        (
            "torchrun --rdzv-id=exp7 --master-port=29511 train.py",
            {},
            {"comm_run_id": "exp7", "comm_port": 29511},
        ),
        (
            "dlrover-run --network-check --exclude-straggler --training_port 61000 --accelerator=ascend-npu "
            "--node_unit=2 --auto-config --auto_tunning --save_at_breakpoint --numa-affinity --membind-policy bind "
            "--ucp_device_type cpu --nproc-per-node=2 train.py",
            {},
            {"total": 2},
        ),
    ],
)
def test_what_a_command_says(cmd: str, of_job: dict[str, Any], of_role: dict[str, Any]) -> None:
    job = read(cmd)
    for owner, expected in ((job, of_job), (only_role(job), of_role)):
        assert {name: getattr(owner, name) for name in expected} == expected


@pytest.mark.parametrize("launcher_name", ["torchrun", "dlrover-run"])
def test_standalone_restarts_module_and_role(launcher_name: str) -> None:
    workload = only_role(
        read(f"{launcher_name} --standalone --nproc-per-node 2 --max-restarts=3 --role worker -m pkg.train --lr 1"),
        "worker",
    )
    assert (workload.max_restart, workload.total) == (3, 2)
    assert parse(workload.entry_point) == EntryPoint(kind="module", target="pkg.train", argv=["--lr", "1"])


@pytest.mark.parametrize("script", ["train", "./train", "folder/", "job.zip", "a.b", "dir/tool"])
def test_a_script_may_have_any_name(script: str) -> None:
    entry = parse(only_role(read(f"torchrun {script} --lr 1")).entry_point)
    assert (entry.kind, entry.argv) == ("script", ["--lr", "1"])
    assert os.path.normpath(entry.target) == os.path.normpath(script)


def test_quotes_in_the_scripts_arguments_are_kept() -> None:
    cmd = """torchrun 'my dir/train.py' --prompt "two  words" """
    cmd += """--json '{"a": "b c"}' --nproc-per-node 7 '' -m --x='$HOME'"""
    workload = only_role(read(cmd))
    assert workload.total == 1
    assert parse(workload.entry_point) == EntryPoint(
        kind="script",
        target="my dir/train.py",
        argv=["--prompt", "two  words", "--json", '{"a": "b c"}', "--nproc-per-node", "7", "", "-m", "--x=$HOME"],
    )


@pytest.mark.parametrize(
    ("flags", "checked"),
    [
        ("", False),
        ("--node-check", True),
        ("--node_check", True),
        ("--network-check", True),
        ("--network_check", True),
        ("--precheck=1", True),
        ("--comm-perf-test", True),
        ("--exclude-straggler", True),
    ],
)
def test_dlrover_run_checks_nodes_when_asked(flags: str, checked: bool) -> None:
    assert only_role(read(f"dlrover-run {flags} train.py")).comm_pre_check is checked
    assert only_role(read("torchrun train.py")).comm_pre_check


def test_what_the_master_does_is_ignored_and_told(caplog: pytest.LogCaptureFixture) -> None:
    cmd = "torchrun --rdzv-backend=c10d --rdzv_endpoint=h:1 --rdzv-conf a=1 --local-addr h --monitor-interval 3 t.py"
    with caplog.at_level(logging.WARNING):
        assert only_role(read(cmd)).total == 1
    (record,) = caplog.records
    for name in ("--rdzv-backend", "--rdzv-endpoint", "--rdzv-conf", "--local-addr", "--monitor-interval"):
        assert name in record.getMessage()


def test_nothing_is_told_where_nothing_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read("torchrun --standalone --nnodes=1 --nproc-per-node=2 --max-restarts=1 --role r -m pkg.train")
    assert caplog.records == []


@pytest.mark.parametrize(
    ("cmd", "said"),
    [
        ("torchrun --no-python -m run", "--no-python and -m contradict each other"),
        ("torchrun --nproc-per-nod 2 --standalonee train.py", "--standalone"),
        ("dlrover-run --nnode=2 train.py", "--nnodes"),
        ("torchrun --nproc-per-node=2", "training_script"),
        ("torchrun --max-restarts=x train.py", "--max-restarts"),
        ("torchrun --nnodes=4:1 train.py", "nnodes='4:1'"),
        ("torchrun --nproc-per-node=many train.py", "must be a number above 0, or cpu, gpu or auto"),
        ("torchrun --nproc-per-node=0 train.py", "must be a number above 0"),
        ("torchrun --max-restarts=-1 train.py", "--max-restarts=-1 is not a number of restarts"),
        ("torchrun --nnodes=2 --node-rank=1 train.py", "--node-rank=1 has nothing to start"),
        ("torchrun --nnodes=2 --node-rank=1 --rdzv-id=7 train.py", "--node-rank=1 has nothing to start"),
        ("torchrun --master-port=70000 train.py", "comm_port"),
    ],
)
def test_wrong_commands_are_value_errors(cmd: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        read(cmd)


ANOTHER = "Only 'dlrover-run' and 'torchrun' commands are supported"


@pytest.mark.parametrize(
    ("cmd", "said"),
    [
        *((cmd, ANOTHER) for cmd in ("mpirun -n 2 train.py", "python train.py", "", "accelerate launch train.py")),
        ("torch-run train.py", "Did you mean 'torchrun'"),
        ("torchrun 'train.py", "Close each quote"),
    ],
)
def test_what_is_no_launchers_command_is_a_job_error(cmd: str, said: str) -> None:
    with pytest.raises(JobError, match=said):
        DLJobBuilder().by_dlrover_run_cmd(cmd)


def test_a_path_and_line_continuations() -> None:
    job = DLJobBuilder().by_dlrover_run_cmd("/usr/local/bin/torchrun \\\n  --nproc-per-node=2 \\\n  train.py").build()
    assert only_role(job).total == 2


def test_the_builder_goes_on_after_a_command() -> None:
    builder = DLJobBuilder().role("learner").by_dlrover_run_cmd("torchrun --nproc-per-node=2 train.py")
    job = builder.config({"a": 1}).workload("judge", "m.f").resource(cpu=1).build()
    assert set(job.workloads) == {"learner", "judge"}


def test_counting_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = len(os.sched_getaffinity(0))
    gpus = 0
    monkeypatch.setattr(launcher, "_num_gpus", lambda env: gpus)
    assert num_workers("3") == 3
    assert num_workers("cpu") == cpus
    assert num_workers("auto") == cpus
    with pytest.raises(ValueError, match="no NVIDIA GPU to count"):
        num_workers("gpu")
    gpus = 2
    assert num_workers("gpu") == 2
    assert num_workers("auto") == 2


def test_with_a_master_the_cluster_is_counted() -> None:
    def node(num_gpus: int, cpu: float, state: NodeState = NodeState.ALIVE) -> NodeStatus:
        devices = [Device(index=index, kind="cuda") for index in range(num_gpus)] or [Device(index=0, kind="virtual")]
        has = NodeResources(cpu=cpu, memory_mb=1, disk_mb=1, devices=devices)
        return NodeStatus(node="n", state=state, hostname="", address="", resources=has, free=has)

    cluster = [node(8, 64), node(4, 32), node(0, 16), node(1, 1, NodeState.LOST)]
    assert [num_workers(word, cluster) for word in ("2", "gpu", "auto", "cpu")] == [2, 4, 4, 16]
    assert [num_workers(word, cluster[2:3]) for word in ("auto", "cpu")] == [16, 16]
    with pytest.raises(ValueError, match="no node of the cluster has a GPU"):
        num_workers("gpu", cluster[2:3])
    with pytest.raises(ValueError, match="the cluster has no node to count"):
        num_workers("auto", cluster[3:])


class NoDriverError(Exception):
    pass


@pytest.mark.parametrize(
    ("env", "count"), [({}, 3), ({"CUDA_VISIBLE_DEVICES": "1,2"}, 2), ({"CUDA_VISIBLE_DEVICES": ""}, 0)]
)
def test_gpus_are_those_that_are_visible(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], count: int) -> None:
    nvml = Mock(NVMLError=NoDriverError, nvmlDeviceGetCount=Mock(return_value=3))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert launcher._num_gpus(env) == count
    nvml.nvmlShutdown.assert_called_once()
    nvml.nvmlInit.side_effect = NoDriverError
    assert launcher._num_gpus(env) == 0


def test_help_names_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        table_parser("torchrun", {}, "unified run").parse_args(["--help"])
    assert done.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: unified run")
    assert "--nproc-per-node" in out


def test_errors_are_option_errors_with_the_programs_name() -> None:
    with pytest.raises(OptionError, match=r"^unified run: unrecognized arguments: --standalon=1.* '--standalone'\?$"):
        table_parser("dlrover-run", {}, "unified run").parse_args(["--standalon=1", "t.py"])


def test_parsers_are_argparse() -> None:
    parser: Any = table_parser("torchrun", {})
    assert isinstance(parser, ArgumentParser)
    assert parser._actions[-1].nargs == REMAINDER
