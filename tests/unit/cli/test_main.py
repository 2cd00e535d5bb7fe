"""The command line of `unified` without a master: its commands, what each loads, exit codes and messages."""

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tests.support.fake_master import worker_status
from unified.cli.job_control import parse_arguments, to_json
from unified.cli.main import COMMANDS, Command, guarded, main
from unified.cli.show import JOB_HEADER, NODE_HEADER, _job_row, _node_row, _print_list, status_lines, table
from unified.cli.stack import Card, _print_cards, head_lines
from unified.cli.submit import load_job
from unified.errors import ClusterError, RefusedError, UsageError
from unified.protocol.client_master import BudgetUse, JobLine, JobStatus, NodeStatus, RoleStatus
from unified.protocol.records import Device, NodeResources, NodeState, Stage, WorkerState
from unified.protocol.stacks import StackReport, WorkerStacks


@pytest.fixture(autouse=True)
def no_master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNIFIED_MASTER", raising=False)
    monkeypatch.setenv("UNIFIED_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("UNIFIED_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("command", ["jobs", "nodes", "status x", "logs x", "stop x", "explain x", "call x r m"])
def test_without_a_master_the_message_says_how_to_give_one(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "--master tcp://HOST:PORT" in said.err
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("words", [["--version"], ["run", "--help"], ["status", "--help"]])
def test_asking_for_help_is_no_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("words", [["nope"], ["jobs", "--nope"], ["status"], ["run", "--nope", "x.py"], ["run"]])
def test_a_wrong_command_line_is_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert 0 < len(capsys.readouterr().err.splitlines()) <= 5


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("you"), 2),
        (RefusedError("name-taken", "a job of that name runs."), 1),
        (RefusedError("not-found", "there is no job 'x'."), 2),
        (ClusterError("it failed"), 1),
        (TimeoutError("too long"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(130), 130),
        (SystemExit(), 0),
        (SystemExit("set DATA_DIR first"), 1),  # the last words of a job file
    ],
)
def test_errors_are_exit_codes(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise error

    assert guarded(fail) == code
    if isinstance(error, SystemExit) and isinstance(error.code, str):
        assert capsys.readouterr().err == f"{error.code}\n"


def test_an_interval_that_is_no_number_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIFIED_LEASE_S", "soon")
    assert main(["jobs", "--master", "tcp://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err == "unified: UNIFIED_LEASE_S='soon' is not a number of seconds.\n"


def test_detaching_needs_a_master_that_stays(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "--detach", "train.py"]) == 2
    assert main(["submit", "--detach", str(tmp_path / "job.py")]) == 2
    assert capsys.readouterr().err.count("needs a master that goes on") == 2


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


JOB = "class Job:\n    def submit(self): return 7\n"


@pytest.mark.parametrize(
    ("text", "suffix"),
    [
        (JOB + "job = Job()\n", ""),
        (JOB + "def build(): return Job()\n", ""),
        (JOB + "class Builder:\n    def build(self): return Job()\njob = Builder()\n", ""),
        (JOB + "def other(): return Job()\n", ":other"),
    ],
)
def test_a_job_file_gives_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, suffix: str) -> None:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("sys.argv", [])
    assert load_job(write(tmp_path / "file.py", text) + suffix).submit() == 7


def test_a_submitted_job_is_named_after_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("sys.argv", [])
    text = "class Job:\n    def submit(self, name, blocking):\n        print(name)\n        return 0\nother = Job()\n"
    file = write(tmp_path / "my file.py", text) + ":other"
    monkeypatch.delenv("UNIFIED_JOB_NAME", raising=False)
    monkeypatch.setenv("UNIFIED_MASTER", "tcp://127.0.0.1:1")  # no cluster is begun for it
    assert main(["submit", file]) == 0
    assert re.fullmatch(r"my-file-[0-9a-f]{4}\n", capsys.readouterr().out)
    monkeypatch.setenv("UNIFIED_JOB_NAME", "nightly")
    assert (main(["submit", file]), capsys.readouterr().out) == (0, "nightly\n")
    assert (main(["submit", file, "--name", "mine"]), capsys.readouterr().out) == (0, "mine\n")


@pytest.mark.parametrize(
    ("text", "suffix", "message"),
    [
        ("x = 1\n", "", "defines neither 'job' nor 'build'"),
        ("my_job = 1\n", ":my_jbo", "Did you mean 'my_job'?"),
        ("job = 1\n", "", "is of type int, not a DLJob"),
        ("def f(:\n", "", r"file\.py:1: .*invalid syntax"),
        ("import os\n\n1 / 0\n", "", r"file\.py:3: ZeroDivisionError"),
    ],
)
def test_a_bad_job_file_is_one_line_that_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, suffix: str, message: str
) -> None:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("sys.argv", [])
    with pytest.raises(UsageError, match=message) as caught:
        load_job(write(tmp_path / "file.py", text) + suffix)
    assert len(str(caught.value).splitlines()) == 1


def test_a_job_file_has_its_own_arguments_and_errors_of_a_relative_path_have_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("sys.argv", ["unified", "submit", "file.py"])
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "file.py", f"import sys\n{JOB}job = Job()\nassert sys.argv == ['file.py']\n")
    assert load_job("file.py").submit() == 7
    for name in ("bad.py", "./bad.py"):
        write(tmp_path / "bad.py", "import os\n\n1 / 0\n")
        with pytest.raises(UsageError, match=r"^bad\.py:3: ZeroDivisionError"):
            load_job(name)


def test_columns_line_up() -> None:
    assert table(["A", "BB"], [["long", 1], ["x", ""]]) == ["A     BB", "long  1", "x"]


def test_on_a_terminal_no_line_wraps_and_empty_columns_make_room() -> None:
    rows = [["a-1", "-", "", "because " * 20], ["b-1", "-", "", "short"]]
    lines = table(["JOB", "EXIT", "ENDED", "REASON"], rows, 40)
    assert lines[0] == "JOB  REASON"
    assert [len(line) <= 40 for line in lines] == [True] * 3
    assert lines[1].endswith("…")
    assert lines[2] == "b-1  short"
    assert table(["JOB", "EXIT"], [["a-1", "-"]]) == ["JOB  EXIT", "a-1  -"]
    assert table(["JOB", "REASON"], [["a-1", "x" * 300]])[1] == "a-1  " + "x" * 159 + "…"


def node(number: int) -> NodeStatus:
    offered = NodeResources(
        cpu=128, memory_mb=1024.0 * 1007, disk_mb=0, devices=[Device(index=index, kind="cuda") for index in range(8)]
    )
    return NodeStatus(
        node=f"gpu-{number:03}", state=NodeState.ALIVE, hostname="h", address=f"10.0.12.{number}", resources=offered,
        free=offered, num_workers=8, seen_s_ago=0.4,
    )  # fmt: skip


def test_on_a_narrow_terminal_a_reason_gets_the_room_of_lesser_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "waits: role trainer needs 1 group of 2 devices; the largest free node has 0"
    lines = [
        JobLine(
            job_id="pretrain-7b-second-4-34fa71bc84", name="p", stage=stage, exit_code=exit_code, reason=reason,
            submitted_at=1e9, ended_at=ended_at, num_workers=2,
        )
        for stage, exit_code, ended_at in ((Stage.INIT, None, None), (Stage.STOPPED, 1, 1e9 + 60))
    ]  # fmt: skip

    def shown(columns: int) -> list[str]:
        monkeypatch.setattr("unified.cli.show.terminal_width", lambda: columns)
        _print_list(lines, False, "no jobs", JOB_HEADER, _job_row)
        return capsys.readouterr().out.splitlines()

    header, waiting, failed = shown(80)
    assert header.split() == ["JOB", "STAGE", "REASON"]
    assert waiting == "pretrain-7b-second-4-34fa71bc84  WAITING  waits: role trainer needs 1 group of …"
    assert failed.split()[:2] == ["pretrain-7b-second-4-34fa71bc84", "FAILED"]
    assert shown(110)[0].split() == ["JOB", "STAGE", "SUBMITTED", "REASON"]
    assert shown(200)[0].split() == JOB_HEADER
    assert shown(200)[1].endswith(reason)


def test_on_a_narrow_terminal_short_reasons_cost_no_column() -> None:
    header, rows = ["JOB", "EXIT", "REASON"], [["a-1", 1, "short"], ["b-1", 0, ""]]
    assert table(header, rows, 17)[0] == "JOB  EXIT  REASON"
    assert table(header, [], 17) == [""]
    assert table(header, rows, 16) == ["JOB  REASON", "a-1  short", "b-1"]


def test_frames_of_a_stack_stand_on_lines_of_their_own_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "130")
    frames = ["/job/work.py:13 in stall", "/job/work.py:12 in \x1b[2Jmain"]
    _print_cards([Card(f"ranks {ranks} (256 of 512), MainThread", frames) for ranks in ("0-255", "256-511")])
    lines = [[part.strip() for part in line.split("│")[1::2]] for line in capsys.readouterr().out.splitlines()]
    assert lines[1:3] == [["/job/work.py:13 in stall"] * 2, ["/job/work.py:12 in main"] * 2]


@pytest.mark.parametrize(("count", "head"), [(1, "trainer: 1 worker"), (2, "trainer: 2 workers")])
def test_the_head_of_stacks_counts_workers(count: int, head: str) -> None:
    workers = [WorkerStacks(worker=f"trainer_2-{rank}_1-0", incarnation=0, rank=rank) for rank in range(count)]
    assert head_lines("trainer", StackReport(workers=workers))[0] == head


def test_a_common_list_of_nodes_fits_80_columns() -> None:
    lines = table(NODE_HEADER, [_node_row(node(number)) for number in (1, 17)], 80)
    assert lines[0].split()[-1] == "SEEN"
    assert all(line.endswith("0.4 s ago") for line in lines[1:])


def test_a_node_out_of_service_says_so_and_why() -> None:
    drained = msgspec.structs.replace(node(1), drained="a new disk", num_workers=0)
    for num_leaving, state in ((1, "DRAINING"), (0, "DRAINED")):
        row = _node_row(msgspec.structs.replace(drained, num_leaving=num_leaving))
        assert (row[1], row[-1]) == (state, "a new disk")


def test_a_status_has_a_line_a_worker_and_the_odd_ones_first_when_there_are_many() -> None:
    workers = [worker_status(rank, "t", name=f"t_50-{rank}_50-{rank}", node="n1") for rank in range(49)]
    status = JobStatus(
        job_id="a-1",
        name="a",
        stage=Stage.RUNNING,
        reason="all run",
        submitted_at=1000.0,
        budgets=[
            BudgetUse(limit="max_restart", subject="t_50-3_50-3", used=2, allowed=1),
            BudgetUse(limit="node_max_restart", subject="n2", used=2, allowed=3),
            BudgetUse(limit="job_max_restart", subject="", used=1, allowed=9),
        ],
        roles=[RoleStatus(name="t", kind="simple", total=50, is_driver=True)],
        workers=[*workers, worker_status(49, "t", name="t_50-49_50-49", node="n1", state=WorkerState.STARTING)],
    )
    lines = status_lines(status, 1012.0)
    assert lines[:2] == ["job a-1 is RUNNING, for 12 s", "  all run"]
    assert "  t: 1 STARTING, 49 RUNNING" in lines
    limits = (
        "max_restart=1: 2 failures of t_50-3_50-3, node_max_restart=3: 2 losses of n2, job_max_restart=9: 1 restart"
    )
    assert f"  charged to its limits: {limits}" in lines
    first = next(index for index, line in enumerate(lines) if "WORKER" in line) + 1
    assert lines[first].split()[:3] == ["t-49", "0", "STARTING"]
    assert lines[-1].strip() == "… 10 more; --json has them all"


def test_arguments_of_a_call_are_json() -> None:
    found = parse_arguments(["3", '"a=b"', "[1,2]", "lr=0.1", 'name="x"', "flag=null"])
    assert found == ([3, "a=b", [1, 2]], {"lr": 0.1, "name": "x", "flag": None})
    with pytest.raises(UsageError, match=r"have to be JSON, and 'last' is not. If it is a text, write '\"last\"';"):
        parse_arguments(["last"])
    with pytest.raises(UsageError, match=r"and 'name=it' is not. If it is a text, write 'name=\"it\"';"):
        parse_arguments(["name=it"])
    with pytest.raises(UsageError, match="'4' comes after a named one"):
        parse_arguments(["lr=1", "4"])


def test_results_of_a_call_are_printed_as_json() -> None:
    value = {"array": np.eye(2), "number": np.float32(0.5), "tensor": torch.ones(1), "tuple": (1, None), "set": {1}}
    assert to_json(value) == '{"array":[[1.0,0.0],[0.0,1.0]],"number":0.5,"tensor":[1.0],"tuple":[1,null],"set":[1]}'
    with pytest.raises(UsageError, match="cannot be printed as JSON: it holds a object"):
        to_json([object()])


@pytest.mark.parametrize("line", ["--help", "status --help", "status x --master tcp://127.0.0.1:9"])
def test_looking_at_a_job_does_not_load_what_describes_one(line: str) -> None:
    script = (
        "import sys\nfrom unified.cli.main import main\n"
        f"main({line.split()!r})\nprint({{'pydantic', 'typer', 'rich', 'omegaconf'}} & set(sys.modules))"
    )
    env = {**os.environ, "UNIFIED_CONNECT_S": "0.01"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_every_command_has_help_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    names = [name for name in COMMANDS if name not in ("run", "key")]
    for words in [*([name] for name in names), ["key", "new"], ["key", "show"]]:
        assert main([*words, "--help"]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"usage: unified {' '.join(words)}")
        assert "show this help" in said


def test_without_a_word_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "explain" in capsys.readouterr().out
    assert main(["key"]) == 2


NUMBERS = ["logs x --tail=-1", "logs x --rank a", "explain x --limit 0", "stop x --timeout -1"]
WORDS = {"runn x.py": "run", "staus": "status", "key shw": "show", "logs x --folow": "--follow"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        *((line, f"Did you mean {meant!r}?") for line, meant in WORDS.items()),
        *((line, f"unified {line.split()[0]}: argument --") for line in NUMBERS),
    ],
)
def test_a_wrong_word_or_number_is_refused(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    told = capsys.readouterr().err
    assert said in told
    assert len(told) < 200, "the hint is hidden behind a list of all words"


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("logs --stream err x --tail 3 trainer-0 -f", "worker", "trainer-0"),
        ("call x actor --timeout 5 add 1 --master tcp://a:1 -2", "arguments", ["1", "-2"]),
        ("explain x --limit 3 trainer-0", "worker", "trainer-0"),
    ],
)
def test_options_may_stand_anywhere(monkeypatch: pytest.MonkeyPatch, line: str, name: str, value: object) -> None:
    words = line.split()
    told: dict[str, object] = {}
    command = COMMANDS[words[0]]
    assert isinstance(command, Command)
    monkeypatch.setattr(f"unified.cli.{command.module}.{words[0]}", lambda **arguments: told.update(arguments))
    assert main(words) == 0
    assert told[name] == value
