"""``unified run``: our options among torchrun's, before the script."""

import os
import shlex
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path

import pytest

from unified.api.builder.torchrun import check_hosts, common_key, key_here
from unified.cli.main import main
from unified.cli.options import chosen_name, job_name
from unified.cli.run import OWN, described, full_spec, quick_spec, run_parser
from unified.errors import JobNameError, OptionError, UsageError
from unified.job.driver import Driver
from unified.job.names import check_job_name
from unified.job.spec import JobSpec, with_nodes

DRIVER = Driver(working_dir="/here", sys_path=["/here"], submitted_by="me@host:1", env={"FOO": "1"})


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


@pytest.mark.parametrize("more", ["", "--hang-timeout 9"])
def test_a_preload_is_the_jobs(more: str) -> None:
    parser = run_parser({})
    parsed = parser.parse_args(f"--preload transformers,trl --preload torch {more} train.py".split())
    own = {name: vars(parsed).pop(name) for name in OWN}
    assert described(parsed, parser, own, "name", master=None).spec.preload == ["transformers", "trl", "torch"]
    with pytest.raises(UsageError, match="'tr-l' is no name of a module"):
        described(parsed, parser, {**own, "preload": ["tr-l"]}, "name", master=None)


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


def quick(line: str, env: Mapping[str, str] | None = None) -> JobSpec | None:
    parser = run_parser({})
    return quick_spec(own_taken(parser, line), parser, "name", DRIVER, env or {})


def own_taken(parser: ArgumentParser, line: str) -> Namespace:
    parsed = parser.parse_args(shlex.split(line))
    for name in ("master", "name", "detach", "no_wait", "env"):
        delattr(parsed, name)
    return parsed


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
def test_the_quick_way_makes_the_same_job_as_the_models(line: str) -> None:
    spec = quick(line, {"UNIFIED_MASTER": "tcp://a:1", "UNIFIED_LEASE_S": "3"})
    assert spec is not None
    parser = run_parser({})
    full, config = full_spec(own_taken(parser, line), parser, "name", DRIVER)
    assert (spec, True) == (full, config.wait)


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


def told(line: str) -> Namespace:
    return run_parser({}).parse_args([*line.split(), "train.py"])


TWO_HOSTS = "--nnodes=2 --node-rank=1 --master-addr=h0 --master-port=29500"


@pytest.mark.parametrize(
    "line",
    [
        TWO_HOSTS,
        TWO_HOSTS.replace("rank=1", "rank=0"),
        "--nnodes=2",
        "--node-rank=1",
        "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=h0:29400 --rdzv-id=7",
        "--nnodes=1:2 --rdzv-backend=c10d --rdzv-endpoint=h0 --rdzv-id=7",
        "--standalone --nnodes=2 --node-rank=1",
    ],
)
def test_torchrun_s_way_on_several_hosts_needs_a_master(line: str) -> None:
    with pytest.raises(UsageError, match=r"unified run: --nnodes=.* without a master: .*--master or UNIFIED_MASTER"):
        check_hosts(told(line), "unified run", has_master=False)


def test_a_folder_or_argument_that_is_not_utf_8_is_named_before_a_cluster_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.mkdir(folder)
    assert main(["run", "--standalone", "train.py", "\udcfe"]) == 2
    assert "roles[0].entry_point.argv[0] is '\\udcfe', which is not UTF-8" in capsys.readouterr().err
    monkeypatch.chdir(folder)
    assert main(["run", "--standalone", "train.py"]) == 2
    assert f"JobSpec.working_dir is '{tmp_path}/\\udcff', which is not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["explain j --limit", "logs j --tail", "logs j --rank"])
def test_a_number_beyond_31_bits_is_refused_where_it_is_given(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words.split(), "99999999999999999999"]) == 2
    assert "99999999999999999999 is above 2147483647" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["--nnodes=3:1", "--nnodes=0", "--nnodes=x", "--max-restarts=-2"])
@pytest.mark.parametrize("has_master", [True, False])
def test_numbers_that_are_none_are_one_sentence_and_exit_code_2(
    wrong: str, has_master: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNIFIED_MASTER", "tcp://127.0.0.1:1" if has_master else "")
    assert main(["run", wrong, "train.py"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("unified run: --")
    assert wrong.partition("=")[2] in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--nnodes=1 --node-rank=0 --master-addr=h0 --rdzv-endpoint=h0:1",
        "--nnodes=1:2 --rdzv-endpoint=localhost:29400 --rdzv-id=7",
        "--standalone --nnodes=2",
    ],
)
def test_one_host_needs_none(line: str) -> None:
    check_hosts(told(line), "unified run", has_master=False)


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (TWO_HOSTS, "h0:29500"),
        (TWO_HOSTS.replace(" --master-port=29500", ""), "h0:29500"),
        ("--nnodes=1:2 --rdzv-endpoint=h0:29400 --rdzv-id=7", "7"),
        ("--nnodes=2 --rdzv-endpoint=h0:29400", "h0:29400"),
        ("--nnodes=1 --rdzv-endpoint=h0:29400 --rdzv-id=7", ""),
        ("--nnodes=2 --rdzv-endpoint=localhost:29400", ""),
    ],
)
def test_with_a_master_commands_on_several_hosts_have_a_name_in_common(line: str, key: str) -> None:
    assert common_key(told(line)) == key
    check_hosts(told(line), "unified run", has_master=True)
    if key:
        name = chosen_name(None, "train.py", {}, key=key)
        assert name == chosen_name(None, "train.py", {}, key=key) == check_job_name(name)


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("--nnodes=1:2 --rdzv-endpoint=localhost:29400", "29400 "),
        ("--nnodes=1:2 --rdzv-endpoint=127.0.0.1:29400 --rdzv-id=7", "29400 7"),
        ("--nnodes=1:2 --rdzv-endpoint=localhost --rdzv-id=7", " 7"),
        ("--nnodes=1:2 --rdzv-id=7", " 7"),
        ("--nnodes=1:2 --rdzv-endpoint=localhost:0", ""),
        ("--nnodes=1:2 --rdzv-endpoint=localhost:29400 --standalone", ""),
        ("--nnodes=1 --rdzv-endpoint=localhost:29400", ""),
        ("--nnodes=1:2", ""),
    ],
)
def test_without_a_master_commands_of_one_world_have_a_key_in_common(line: str, key: str) -> None:
    assert key_here(told(line)) == key


def test_a_later_node_without_a_name_in_common_is_refused() -> None:
    with pytest.raises(UsageError, match="--node-rank=1 has nothing to start"):
        check_hosts(told("--nnodes=2 --node-rank=1"), "unified run", has_master=True)


def test_a_range_of_nodes_is_what_the_cluster_has() -> None:
    parser = run_parser({})
    spec, _ = full_spec(own_taken(parser, "--nnodes=2:4 --nproc-per-node=3 train.py"), parser, "name", DRIVER)
    found = [with_nodes(spec, number) for number in (1, 3, 9)]
    assert [job.roles[0].total for job in found] == [6, 9, 12]
    assert [job.node_num for job in found] == [2, 3, 4]


def test_the_quick_way_refuses_what_the_models_refuse() -> None:
    parser = run_parser({})
    with pytest.raises(JobNameError):
        quick_spec(own_taken(parser, "train.py"), parser, "a/b", DRIVER, {})


def test_nothing_slow_is_loaded_before_the_job_is_sent() -> None:
    script = (
        "import sys, unified.cli.main, unified.cli.run, unified.client.submission; "
        "print(sorted({'pydantic', 'typer', 'rich', 'torch', 'numpy', 'omegaconf', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
