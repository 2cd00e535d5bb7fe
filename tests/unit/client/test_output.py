"""What workers print, on the driver's own stdout and stderr."""

import io
import os
from pathlib import Path
from typing import TypeVar

import pytest

from unified.client.logs import Output, OutputSource
from unified.client.output import OutputWriter, Prefix, TracebackFilter, WorkerOutput, is_same_place
from unified.protocol.client_master import JobStatus, RoleStatus
from unified.protocol.records import Stage

A, B = OutputSource("[w-0] ", "out"), OutputSource("[w-1] ", "out")
ERR = OutputSource("[w-0] ", "err")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class File(io.TextIOWrapper):
    """A file, whose content is bytes."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")

    def content(self) -> bytes:
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue()


F = TypeVar("F", Terminal, File)


def shown(on: F, outputs: tuple[Output, ...], prefix: Prefix) -> F:
    writer = OutputWriter({"out": on, "err": on}, prefix=prefix)
    for output in outputs:
        writer.write([output])
    writer.close()
    return on


def written(*outputs: Output, prefix: Prefix = "auto") -> bytes:
    return shown(File(), outputs, prefix).content()


def drawn(*outputs: Output, prefix: Prefix = "auto") -> str:
    return shown(Terminal(), outputs, prefix).getvalue()


def status(num_workers: int) -> JobStatus:
    role = RoleStatus(name="w", kind="elastic", total=num_workers, is_driver=True)
    return JobStatus(job_id="j", name="j", stage=Stage.RUNNING, reason="", roles=[role], workers=[])


ODD = b"\x1b[31mred\x1b[0m \xff\x00 \t end\n"
BEGUN = [Output(A, "load"), Output(A, is_quiet=True)]
CUT = Output(A, "half a li", is_end=True)


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([Output(A, ODD.decode("utf-8", "surrogateescape"))], ODD),
        # lines of several workers do not mix
        ([Output(A, "one\ntw"), Output(B, "uno\nd"), Output(A, "o\n"), Output(B, "os\n")], b"one\nuno\ntwo\ndos\n"),
        # a line that does not go on is shown, and written whole when others broke in
        ([*BEGUN, Output(A, "ing\n")], b"loading\n"),
        ([*BEGUN, Output(B, "uno\n"), Output(A, "ing\n")], b"load\nuno\nloading\n"),
        ([*BEGUN, Output(B, "uno\n")], b"load\nuno\n"),
        # a line of which only the end came later is there once
        ([*BEGUN, Output(B, "uno\n"), Output(A, "\n")], b"load\nuno\n"),
        ([*BEGUN, Output(B, "uno\n"), Output(A, "\nnext\n")], b"load\nuno\nnext\n"),
        ([*BEGUN, Output(B, "uno\nd", is_quiet=True), Output(A, "\n")], b"load\nuno\nd"),
        ([*BEGUN, Output(A, "\n"), Output(B, "uno\n"), Output(A, "load\n")], b"load\nuno\nload\n"),
        # what a crash cut off is there, and others begin a line
        ([CUT], b"half a li"),
        ([CUT, Output(B, "uno\n")], b"half a li\nuno\n"),
        ([Output(A, "half a li")], b"half a li"),
        # a progress bar is what was printed, and leaves others their lines
        ([Output(A, "\r10%"), Output(A, "\r20%"), Output(A, "\n")], b"\r10%\r20%\n"),
        ([Output(A, "10%\r"), Output(B, "uno\n"), Output(A, "20%\r")], b"10%\r\nuno\n20%\r"),
    ],
)
def test_a_file_gets_what_was_printed_and_nothing_else(outputs: list[Output], expected: bytes) -> None:
    assert written(*outputs) == expected


def test_a_line_without_an_end_is_not_held_for_ever() -> None:
    assert written(Output(A, "x" * 70000), Output(A, "y"), Output(B, "uno\n"), Output(A, "z\n")) == (
        b"x" * 70000 + b"\nuno\nyz\n"
    )


def test_one_worker_alone_is_shown_at_once() -> None:
    out, err = File(), File()
    output = WorkerOutput(out, err)
    output.update(status(1))
    output.write([Output(A, "name? "), Output(ERR, "\r 10%")])
    assert (out.content(), err.content()) == (b"name? ", b"\r 10%")
    output.break_line()  # a sentence of ours
    assert (out.content(), err.content()) == (b"name? ", b"\r 10%\n")


def test_of_several_only_whole_lines_are() -> None:
    out, err = File(), File()
    output = WorkerOutput(out, err)
    output.update(status(2))
    output.write([Output(A, "name? "), Output(ERR, "oh\n")])
    assert (out.content(), err.content()) == (b"", b"oh\n")
    output.close()
    assert out.content() == b"name? "


def test_what_is_missing_is_said_on_stderr() -> None:
    out, err = File(), File()
    WorkerOutput(out, err).write([Output(A, "a\n", note="5 kB skipped")])
    assert (out.content(), err.content()) == (b"a\n", "[w-0] … 5 kB skipped\n".encode())


def test_a_prefix_is_there_where_it_was_asked_for() -> None:
    both = [Output(A, "one\n"), Output(B, "uno\n")]
    assert written(*both, prefix="always") == b"[w-0] one\n[w-1] uno\n"
    assert written(Output(OutputSource("[default0]:", "out", is_prefixed=True), "one\n")) == b"[default0]:one\n"
    assert drawn(*both) == "[w-0] one\n[w-1] uno\n"
    assert drawn(*both, prefix="never") == "one\nuno\n"


def test_a_terminal_shows_a_progress_bar_in_place() -> None:
    bar = [Output(A, "\r10%", is_quiet=True), Output(A, "\r20%", is_quiet=True), Output(A, "\n")]
    assert drawn(*bar) == "[w-0] 10%\r\x1b[K[w-0] 20%\n"
    assert drawn(*bar[:2], Output(B, "uno\n"), *bar[2:]) == "[w-0] 10%\r\x1b[K[w-0] 20%\n[w-1] uno\n"


def test_a_line_that_a_sentence_of_ours_broke_off_where_it_ends_is_shown_once() -> None:
    """A program without buffers, as workers are, writes a line and its end one after the other."""
    for file in (File(), Terminal()):
        output = WorkerOutput(File(), file)
        output.update(status(1))
        output.write([Output(ERR, "a warning")])
        output.break_line()
        output.write([Output(ERR, "\nmore\n")])
        shown = file.content().decode() if isinstance(file, File) else file.getvalue()
        assert shown.replace("[w-0] ", "") == "a warning\nmore\n"


def test_a_terminal_is_not_told_what_it_should_not_do() -> None:
    assert drawn(Output(A, "a\x1b[2Jb \x1b[31mred\x1b[0m \udcff\n")) == "[w-0] ab \x1b[31mred\x1b[0m \ufffd\n"


def test_two_streams_of_one_file_are_one_place(tmp_path: Path) -> None:
    with open(tmp_path / "a", "w") as one, open(tmp_path / "a", "a") as same, open(tmp_path / "b", "w") as other:
        assert is_same_place(one, same)
        assert not is_same_place(one, other)
        assert is_same_place(Terminal(), Terminal())
        WorkerOutput(one, same).write([Output(A, "half", is_end=True), Output(ERR, "oh\n")])
        assert Path(one.name).read_text() == "half\noh\n"


@pytest.mark.parametrize("name", ["out", "err"])
def test_a_reader_that_went_away_changes_nothing_for_the_other_stream(name: str) -> None:
    from unified.client.terminal import lasting

    reading, writing = os.pipe()
    os.close(reading)
    file = File()
    with os.fdopen(writing, "w") as pipe:
        gone = lasting(pipe)
        output = WorkerOutput(*((gone, file) if name == "out" else (file, gone)))
        output.write([Output(A, "one\n"), Output(ERR, "oh\n")])
        output.write([Output(A, "two\n"), Output(ERR, "dear\n")])
    assert file.content() == (b"oh\ndear\n" if name == "out" else b"one\ntwo\n")


FIRST, AGAIN = OutputSource("[w-0] ", "err"), OutputSource("[w-0#1] ", "err")
TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f()\nValueError: no\n'
CHAIN = f"{TRACEBACK}\nDuring handling of the above exception, another exception occurred:\n\n{TRACEBACK}"
SAME = "ValueError: no (the same traceback as w-0, above)\n"


def filtered(source: OutputSource, *texts: str, by: TracebackFilter) -> str:
    outputs = [*(Output(source, text) for text in texts), Output(source, is_end=True)]
    return "".join(output.text for output in by.feed(outputs))


@pytest.mark.parametrize("traceback", [TRACEBACK, CHAIN], ids=["one", "chain"])
@pytest.mark.parametrize("cut_at", [0, 50, 90, len(TRACEBACK) - 1])
def test_a_traceback_is_shown_once_however_its_text_comes(traceback: str, cut_at: int) -> None:
    by = TracebackFilter()
    assert not by.has_shown(traceback)
    assert filtered(FIRST, "a\n" + traceback, "b\n" + TRACEBACK, by=by) == f"a\n{traceback}b\n{TRACEBACK}", "its own"
    assert by.has_shown(traceback)
    assert filtered(AGAIN, "a\n" + traceback[:cut_at], traceback[cut_at:], "b", by=by) == f"a\n{SAME}b"
    assert not by.has_shown(traceback.replace("no", "yes"))


def test_a_traceback_without_an_end_is_shown_at_the_end_and_before_a_gap() -> None:
    by = TracebackFilter()
    assert filtered(FIRST, TRACEBACK[:60], by=by) == TRACEBACK[:60]
    outputs = by.feed([Output(FIRST, TRACEBACK[:60]), Output(FIRST, "x\n", note="5 kB skipped")])
    assert [(output.text, output.note) for output in outputs] == [
        ("", ""),
        (TRACEBACK[:60], ""),
        ("x\n", "5 kB skipped"),
    ]
