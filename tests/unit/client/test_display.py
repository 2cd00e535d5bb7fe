"""What a person sees, on a terminal and off it."""

import io
import os
import re
from itertools import groupby
from pathlib import Path

import msgspec
import pytest

from tests.support.fake_master import worker_status
from unified.client.display import LiveDisplay, PlainDisplay, QuietDisplay, open_display
from unified.client.logs import Output, OutputSource, Stream
from unified.client.terminal import lasting, printable
from unified.errors import UsageError
from unified.protocol.client_master import JobStatus, RoleStatus
from unified.protocol.records import Progress, Stage, TimeSpent


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def said(text: str, stream: Stream = "out") -> list[Output]:
    return [Output(OutputSource("[trainer-0] ", stream), text)]


def running(step: int, restarts: int = 0, reason: str = "all workers run", stage: Stage = Stage.RUNNING) -> JobStatus:
    worker = worker_status(progress=Progress(step=step, total=10, metrics={"loss": 1.5}))
    role = RoleStatus(name="trainer", kind="elastic", total=1, is_driver=True, round=1, num_restarts=restarts)
    return JobStatus(job_id="gpt-1", name="gpt", stage=stage, reason=reason, roles=[role], workers=[worker])


def test_plain_says_the_stage_once_and_steps_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("unified.client.display.time.monotonic", lambda: now[0])
    out, err = io.StringIO(), io.StringIO()
    with PlainDisplay(out, err) as display:
        display.update(running(1))
        display.update(running(2))
        now[0] += 6
        display.update(running(3))
        display.update(running(4, restarts=1))
        display.output(said("hello\n"))
    assert err.getvalue().splitlines() == [
        "gpt-1  RUNNING  all workers run",
        "gpt-1  trainer: 1 RUNNING, round 1, step 1/10, loss 1.5",
        "gpt-1  trainer: 1 RUNNING, round 1, step 3/10, loss 1.5",
        "gpt-1  trainer: 1 RUNNING, round 1, step 4/10, loss 1.5, 1 restart",
    ]
    assert out.getvalue() == "hello\n"


@pytest.mark.parametrize("choice", ["plain", "live"])
def test_a_job_that_stalls_says_so_as_time_passes_and_no_more_once_it_steps(choice: str) -> None:
    err = Terminal()
    stalls = msgspec.structs.replace(running(1), times=TimeSpent(phase="productive", since=100.0, stalls_at=130.0))
    with open_display({"UNIFIED_PROGRESS": choice}, out=io.StringIO(), err=err) as display:
        for now in (101.0, 130.0, 131.0):
            display.update(stalls, now)
        display.update(running(2), 140.0)
    drawn = [line.strip() for line in re.findall(r"gpt-1  [A-Z]+  [a-z][\w .]+", err.getvalue())]
    expected = [
        "RUNNING  all workers run",
        "STALLED  no step for 30 s",
        "STALLED  no step for 31 s",
        "RUNNING  all workers run",
    ]
    assert [line for line, _ in groupby(drawn)] == [
        f"gpt-1  {text}" for text in expected if choice == "live" or "31" not in text
    ]


@pytest.mark.parametrize("choice", ["plain", "live"])
def test_the_last_progress_is_shown_and_stays(choice: str) -> None:
    err = Terminal()
    with open_display({"UNIFIED_PROGRESS": choice}, out=io.StringIO(), err=err) as display:
        display.update(running(1))
        display.update(running(2))
        display.update(running(10, stage=Stage.STOPPED))
    assert err.getvalue().count("gpt-1  trainer: 1 RUNNING, round 1, step 10/10, loss 1.5\n") == 1


def test_live_draws_a_line_a_role_and_lets_output_scroll_above() -> None:
    terminal = Terminal()
    with open_display({"TERM": "xterm"}, out=terminal, err=terminal) as display:
        assert isinstance(display, LiveDisplay)
        display.update(running(3, reason="it [runs]"))
        display.output(said("hello [bold]world[/bold]\n"))
        display.note("gpt-1  stopping in order")
    text = terminal.getvalue()
    assert "gpt-1  RUNNING  it [runs]" in text
    assert "step 3/10" in text
    assert "loss 1.5" in text
    assert "[trainer-0] hello [bold]world[/bold]" in text  # a worker's brackets are no markup
    assert "stopping in order" in text


def test_live_writes_output_to_a_file_untouched() -> None:
    out, terminal = io.StringIO(), Terminal()
    with LiveDisplay(out, terminal) as display:
        display.output(said("\x1b[31mred\x1b[0m\n") + said("wrong\n", "err"))
    assert out.getvalue() == "\x1b[31mred\x1b[0m\n"
    assert "red" not in terminal.getvalue()
    assert "[trainer-0] wrong" in terminal.getvalue()


def test_live_shows_what_is_not_a_whole_line_yet_below_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified.client.display.LIVE_EVERY_S", 0.0)
    terminal = Terminal()
    with LiveDisplay(terminal, terminal) as display:
        display.update(running(1))
        display.output(said("\r 10%", "err") + said("name? "))
        shown = terminal.getvalue()
        assert shown.index("step 1/10") < shown.index("[trainer-0]  10%") < shown.index("[trainer-0] name? ")
        display.output(said("\r 20%", "err"))
        assert "[trainer-0]  20%" in terminal.getvalue()
    assert terminal.getvalue().count("[trainer-0] name? ") >= 2  # it stays when the block is taken away


def test_the_environment_chooses() -> None:
    file, terminal = io.StringIO(), Terminal()
    assert type(open_display({}, out=file, err=file)) is PlainDisplay
    assert type(open_display({"TERM": "dumb"}, out=terminal, err=terminal)) is PlainDisplay
    assert type(open_display({"UNIFIED_PROGRESS": "plain"}, out=terminal, err=terminal)) is PlainDisplay
    assert type(open_display({"UNIFIED_PROGRESS": "0"}, out=terminal, err=terminal)) is QuietDisplay
    with pytest.raises(UsageError, match="UNIFIED_PROGRESS='maybe'"):
        open_display({"UNIFIED_PROGRESS": "maybe"})


def test_quiet_says_nothing_about_progress() -> None:
    out, err = io.StringIO(), io.StringIO()
    with QuietDisplay(out, err) as display:
        display.update(running(1))
        display.output(said("hello\n"))
    assert (out.getvalue(), err.getvalue()) == ("hello\n", "")


def test_a_terminal_gets_colours_and_tabs_and_nothing_else_that_a_worker_prints() -> None:
    line = "a\tb \x1b[31mred\x1b[0m\x1b[2J\x1b]0;title\x07\x1b[?25l\x1bc\x07\x08\x9b1m\x1b] cut"
    assert printable(line) == "a\tb \x1b[31mred\x1b[0m1m"
    assert printable("größe 表") == "größe 表"
    terminal, file = Terminal(), io.StringIO()
    QuietDisplay(terminal, file).output(said(f"{line}\n"))
    QuietDisplay(file, terminal).output(said(f"{line}\n"))
    assert terminal.getvalue() == f"[trainer-0] {printable(line)}\n"
    assert file.getvalue() == f"{line}\n"


@pytest.mark.parametrize("choice", ["plain", "live"])
def test_a_reader_that_goes_away_is_no_error(choice: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        with open_display({"UNIFIED_PROGRESS": choice}, out=pipe, err=pipe) as display:
            display.note("gpt-1  submitted")
            display.update(running(1))
            display.output(said("hello\n"))
        assert os.readlink(f"/proc/self/fd/{writing}") == os.devnull  # so that the flush at exit says nothing either


@pytest.mark.parametrize("choice", ["plain", "live"])
@pytest.mark.parametrize("both", [False, True])
def test_a_full_disk_ends_the_output_and_not_the_job(
    choice: str, both: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full, io.StringIO() as other:
        with open_display({"UNIFIED_PROGRESS": choice}, out=full, err=full if both else other) as display:
            display.note("gpt-1  submitted")
            display.update(running(1))
            display.output(said("hello\n"))
            display.output(said("again\n"))
        assert os.readlink(f"/proc/self/fd/{full.fileno()}") == os.devnull  # so that the flush at exit does not fail
    text = "No space left on device (disk /dev): /dev/full lacks all further output; `unified logs` shows it"
    assert capsys.readouterr().err == f"unified: {text}\n"
    assert lasting(None).write("hello") == 5


def test_output_to_a_descriptor_that_was_closed_is_dropped() -> None:
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w")
    os.close(writing)
    out = lasting(stream)
    out.write("hello")
    out.flush()
    assert os.readlink(f"/proc/self/fd/{writing}") == os.devnull, "so that the flush at exit does not fail"
    stream.close()
    os.close(reading)


def test_live_shows_equal_lines_of_many_workers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def show() -> str:
        terminal = Terminal()
        with LiveDisplay(terminal, terminal) as display:
            sources = [OutputSource(f"[trainer-{rank}] ", "out") for rank in range(20)]
            display.output([Output(source, "the same\n") for source in sources])
            display.note("a sentence of ours")
        return terminal.getvalue()

    shown = show()
    assert shown.count("the same") == 1
    assert shown.index("[trainer 0-19 ×20] the same") < shown.index("a sentence of ours")
    monkeypatch.setenv("UNIFIED_FOLD", "0")
    assert show().count("the same") == 20
