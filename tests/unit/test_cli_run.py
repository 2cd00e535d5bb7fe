"""``unified run``: our options among torchrun's, before the script."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Literal

import pytest

from unified.cli.naming import job_name
from unified.cli.quick import quick_spec
from unified.cli.run import full_spec, run_parser
from unified.errors import JobNameError, OptionError
from unified.job.driver import Driver
from unified.job.spec import JobSpec

DRIVER = Driver(working_dir="/here", sys_path=["/here"], submitted_by="me@host:1")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in list(os.environ):
        if variable.startswith(("UNIFIED_", "DLROVER_", "PET_")):
            monkeypatch.delenv(variable)


@pytest.mark.parametrize(
    ("line", "script", "rest"),
    [
        ("train.py", "train.py", ""),
        ("--master tcp://a:1 --nproc-per-node 2 train.py --master b --lr 1", "train.py", "--master b --lr 1"),
        ("--standalone --nnodes=1 --detach -m pkg.train --name y --help", "pkg.train", "--name y --help"),
        ("--no-wait --master-addr h --master_port 5 -r3 --stand train.py -m", "train.py", "-m"),
    ],
)
def test_what_follows_the_script_is_the_script_s(line: str, script: str, rest: str) -> None:
    parsed = run_parser({}).parse_args(line.split())
    assert (parsed.training_script, parsed.training_script_args) == (script, rest.split())


def test_our_own_options_stand_among_torchrun_s() -> None:
    parsed = run_parser({}).parse_args(["--nnodes=1", "--name", "x", "--master=a", "--detach", "--no-wait", "t.py"])
    assert (parsed.name, parsed.master, parsed.detach, parsed.no_wait) == ("x", "a", True, True)


@pytest.mark.parametrize("line", ["--name", "--nope train.py", "", "--nproc-per-nod3=2 train.py"])
def test_a_wrong_command_line_is_refused(line: str) -> None:
    with pytest.raises(OptionError, match="unified run: "):
        run_parser({}).parse_args(line.split())


@pytest.mark.parametrize(
    ("script", "stem"),
    [("dir/train.py", "train"), ("pkg.mod", "pkg"), ("a b/ü x.py", "x"), ("-.py", "run"), ("", "run")],
)
def test_a_job_is_named_after_its_script(script: str, stem: str) -> None:
    first, second = job_name(script), job_name(script)
    assert first != second
    assert first.rpartition("-")[0] == stem


def quick(line: str, kind: Literal["CPU", "GPU"] = "CPU", env: Mapping[str, str] | None = None) -> JobSpec | None:
    parser = run_parser({})
    return quick_spec(own_taken(parser, line), parser, "name", kind, DRIVER, env or {})


def own_taken(parser: ArgumentParser, line: str) -> Namespace:
    parsed = parser.parse_args(shlex.split(line))
    for name in ("master", "name", "detach", "no_wait"):
        delattr(parsed, name)
    return parsed


@pytest.mark.parametrize("kind", ["CPU", "GPU"])
@pytest.mark.parametrize(
    "line",
    [
        "train.py",
        "--nproc-per-node=2 --nnodes=1 train.py --lr 1 'two words'",
        "--nnodes 3 --nproc_per_node 4 --max-restarts=5 --standalone dir/train.py",
        "--nproc-per-node=2 -m pkg.train -x",
        "--run-path train.py",
    ],
)
def test_the_quick_way_makes_the_same_job_as_the_models(line: str, kind: Literal["CPU", "GPU"]) -> None:
    spec = quick(line, kind, {"UNIFIED_MASTER": "tcp://a:1", "UNIFIED_LEASE_S": "3"})
    assert spec is not None
    parser = run_parser({})
    assert (spec, True) == full_spec(own_taken(parser, line), parser, "name", kind, DRIVER)


@pytest.mark.parametrize(
    ("line", "env"),
    [
        ("--nnodes=1:2 train.py", {}),
        ("--nproc-per-node=auto train.py", {}),
        ("--role=w train.py", {}),
        ("--master-port=5 train.py", {}),
        ("--no-python ls", {}),
        ("script_without_suffix", {}),
        ("train.py", {"UNIFIED_JOB_MAX_RESTART": "1"}),
        ("train.py", {"DLROVER_UNIFIED_JOB_MAX_RESTART": "1"}),
        ("train.py", {"DLROVER_WORKING_DIR": "/w"}),
    ],
)
def test_what_is_out_of_the_ordinary_is_left_to_the_models(line: str, env: dict[str, str]) -> None:
    assert quick(line, env=env) is None


def test_the_quick_way_refuses_what_the_models_refuse() -> None:
    parser = run_parser({})
    with pytest.raises(JobNameError):
        quick_spec(own_taken(parser, "train.py"), parser, "a/b", "CPU", DRIVER, {})


def test_nothing_slow_is_loaded_before_the_job_is_sent() -> None:
    script = (
        "import sys, unified.cli.main, unified.cli.run, unified.client.submission; "
        "print(sorted({'pydantic', 'typer', 'rich', 'torch', 'numpy', 'omegaconf', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
