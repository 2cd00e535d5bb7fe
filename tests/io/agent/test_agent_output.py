"""Workers' output on disk: written promptly, bounded, read back by absolute offset."""

import math
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec import json

from tests.support.full_disk import MountDisk
from unified.protocol.agent_master import OutputTail, ReadAgentLog
from unified.protocol.records import JobWorkerIncarnation, WorkerReport
from unified_agent.logs.logfile import LogFile, LogSlice, last_lines, read_slice
from unified_agent.logs.output import (
    KEEP_S,
    Destination,
    OutputClosed,
    OutputFailed,
    OutputLost,
    OutputReader,
    SliceRead,
    TailsRead,
)
from unified_agent.logs.series import MAX_SERIES_BYTES

DEADLINE_MS = 60_000
INCARNATION = JobWorkerIncarnation("job-1", "w-0", 2)
FOLLOWED = Destination(is_followed=True)


def run(command: list[str], within_s: float, passed: list[int]) -> tuple[bytes, bytes]:
    """Run a program without an agent's `Processes`."""
    done = subprocess.run(command, capture_output=True, timeout=within_s, pass_fds=passed)
    return done.stdout, done.stderr


class Output:
    """An `OutputReader`, and the results that it gave."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.reader = OutputReader(folder, max_bytes=1000, max_files=3, run=run, clock=clock)
        self._results: list[OutputClosed | SliceRead | OutputFailed] = []
        self.tails: list[OutputTail] = []
        self.lost: list[OutputLost] = []

    def next(self) -> OutputClosed | SliceRead | OutputFailed:
        while not self._results:
            poll = select.poll()
            poll.register(self.reader.ready, select.POLLIN)
            assert poll.poll(DEADLINE_MS), "no answer"
            for result in self.reader.take():
                if isinstance(result, TailsRead):
                    self.tails += result.tails
                elif isinstance(result, OutputLost):
                    self.lost.append(result)
                else:
                    self._results.append(result)
        return self._results.pop(0)

    def read(
        self,
        offset: int = 0,
        stream: Literal["out", "err", "both", "metrics"] = "out",
        incarnation: JobWorkerIncarnation = INCARNATION,
        max_bytes: int = 65536,
        keep: bool = False,
        **lines: Any,
    ) -> LogSlice:
        order = ReadAgentLog(
            job_id=incarnation.job_id,
            worker=incarnation.worker,
            worker_incarnation=incarnation.number,
            stream=stream,
            offset=offset,
            max_bytes=max_bytes,
            keep=keep,
            **lines,
        )
        self.reader.read(order, request_id=5)
        answer = self.next()
        assert isinstance(answer, SliceRead)
        assert answer.request_id == 5
        return answer.slice

    def everything(self, keep: bool = False) -> bytes:
        seen = b""
        while found := self.read(len(seen), keep=keep).data:
            seen += found
        return seen

    def read_until(self, data: bytes, stream: Literal["out", "err"] = "out") -> LogSlice:
        while (found := self.read(stream=stream)).data != data:
            assert data.startswith(found.data), found
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Output]:
    one = Output(tmp_path)
    yield one
    one.reader.close()


def test_what_is_printed_can_be_read_while_the_worker_lives(bench: Output, tmp_path: Path) -> None:
    out, err = bench.reader.open(INCARNATION)
    os.write(out, b"one\n")
    os.write(err, b"oh\n")
    found = bench.read_until(b"one\n")
    assert (found.offset, found.size, found.path) == (0, 4, str(tmp_path / "job-1/w-0/2.out"))
    bench.read_until(b"oh\n", "err")
    os.write(out, b"two\n")
    bench.read_until(b"one\ntwo\n")
    assert bench.read(4).data == b"two\n"
    assert bench.read(-4).data == b"two\n"
    assert bench.read(2, max_bytes=3).data == b"e\nt"
    assert bench.read(99) == LogSlice(offset=8, size=8, path=found.path)
    os.close(out)
    os.close(err)


def test_the_end_of_an_incarnation_brings_its_last_lines(bench: Output) -> None:
    out, err = bench.reader.open(INCARNATION)
    os.write(err, b"".join(b"line %d\n" % number for number in range(50)))
    bench.reader.finish(INCARNATION, -9)
    closed = bench.next()
    assert closed == OutputClosed(INCARNATION, -9, "\n".join(f"line {number}" for number in range(10, 50)))
    os.close(out)  # a stray that still holds the pipe holds nothing up
    os.close(err)


def test_lines_that_only_the_copy_lacks_are_told_too(bench: Output, tmp_path: Path, small_disk: MountDisk) -> None:
    small_disk(tmp_path / "copies").fill()
    copy = tmp_path / "copies/0/stdout.log"
    out, err = bench.reader.open(INCARNATION, Destination(copy=str(copy)))
    for _ in range(8):
        os.write(out, (b"x" * 65535 + b"\n"))
    os.close(out)
    os.close(err)
    bench.reader.finish(INCARNATION, 0)
    assert isinstance(bench.next(), OutputClosed)
    assert bench.lost[-1].stream == "stdout"
    # Its end was written, so there are four lines less, from one time until another.
    assert bench.lost[-1].text.startswith(f"{copy}: 4 lines (262144 bytes) dropped from ")
    assert bench.lost[-1].text.endswith(f"No space left on device, except for state (disk {tmp_path}/copies)")


def test_an_incarnation_that_never_began_can_be_finished(bench: Output) -> None:
    bench.reader.finish(INCARNATION, 0)
    assert bench.next() == OutputClosed(INCARNATION, 0, "")


def test_many_incarnations_at_once_do_not_mix(bench: Output, tmp_path: Path) -> None:
    incarnations = [JobWorkerIncarnation("job-1", f"w-{rank}", 0) for rank in range(8)]
    pipes = {incarnation: bench.reader.open(incarnation) for incarnation in incarnations}
    for _ in range(20):
        for incarnation, (out, _) in pipes.items():
            os.write(out, f"{incarnation.worker}\n".encode())
    for incarnation in incarnations:
        bench.reader.finish(incarnation, 0)
    assert {bench.next() for _ in incarnations} == {OutputClosed(incarnation, 0, "") for incarnation in incarnations}
    for incarnation in incarnations:
        assert (tmp_path / f"job-1/{incarnation.worker}/0.out").read_text() == f"{incarnation.worker}\n" * 20
        for descriptor in pipes[incarnation]:
            os.close(descriptor)


@pytest.mark.parametrize("name", ["../w-0", "..", "", "a/b", "a\0b"])
def test_only_workers_output_can_be_read(bench: Output, name: str) -> None:
    assert "is no worker of this node" in bench.read(incarnation=JobWorkerIncarnation("job-1", name, 0)).error
    assert "is no worker of this node" in bench.read(incarnation=JobWorkerIncarnation(name, "w-0", 0)).error


def test_unknown_output_and_both_streams_at_once_are_errors(bench: Output) -> None:
    assert bench.read().error.endswith("2.out cannot be read: No such file or directory")
    assert "two files" in bench.read(stream="both").error


def test_rotation_bounds_the_disk_and_keeps_absolute_offsets(tmp_path: Path) -> None:
    path = tmp_path / "0.out"
    file = LogFile(path, max_bytes=100, max_files=3)
    everything = b"".join(b"%09d\n" % number for number in range(100))
    for start in range(0, len(everything), 37):
        file.write(everything[start : start + 37])
    file.close()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["0.out", "0.out.1", "0.out.2", "0.out.base"]
    assert [one.stat().st_size for one in sorted(tmp_path.glob("0.out*"))[:3]] == [100, 100, 100]
    seen = b""
    offset = 0
    while (found := read_slice(path, offset, 30, 3)).data:
        offset = found.offset + len(found.data)
        seen += found.data
    assert seen == everything[-300:]
    assert offset == found.size == 1000
    assert read_slice(path, -10, 99, 3).data == everything[-10:]


def test_a_file_of_an_earlier_cluster_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "0.out"
    old = LogFile(path, max_bytes=10, max_files=3)
    old.write(b"x" * 35)
    old.close()
    new = LogFile(path, max_bytes=10, max_files=3)
    new.write(b"new")
    new.close()
    assert [one.name for one in tmp_path.iterdir()] == ["0.out"]
    assert read_slice(path, 0, 99, 3) == LogSlice(data=b"new", offset=0, size=3, path=str(path))


def test_a_disk_that_refuses_costs_the_output_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    file = LogFile(tmp_path / "file/0.out", max_bytes=10, max_files=2)
    file.write(b"x" * 100)
    file.close()
    assert len(caplog.records) == 1
    assert "output is dropped" in caplog.text
    assert last_lines(file.path) == ""


def report(
    step: int, total: int | None = None, metrics: dict[str, float | int | str | None] | None = None
) -> WorkerReport:
    return WorkerReport(
        at=100.0 + step, step=step, total=total, metrics=metrics or {}, incarnation=INCARNATION.number, number=step
    )


def test_reports_are_lines_beside_the_log_until_the_end_of_an_incarnation(bench: Output, tmp_path: Path) -> None:
    stale = tmp_path / "job-1/w-0/2.metrics.jsonl"
    stale.parent.mkdir(parents=True)
    stale.write_text("of an earlier cluster\n")
    streams = bench.reader.open(INCARNATION)
    assert bench.read(stream="metrics") == LogSlice()
    kept = report(3, total=9, metrics={"loss": 0.5, "phase": "fit\n"})
    bench.reader.keep_reports(INCARNATION, [kept])
    bench.reader.keep_reports(INCARNATION, [report(4, metrics={"loss": math.nan})])
    found = bench.read(stream="metrics")
    lines = [json.decode(line, type=WorkerReport) for line in found.data.splitlines()]
    assert lines == [kept, report(4, metrics={"loss": None})]
    assert bench.read(found.size - 2, stream="metrics", keep=True).data == b"}\n"
    bench.reader.finish(INCARNATION, 0)
    bench.next()
    bench.reader.keep_reports(INCARNATION, [report(5)])
    assert bench.read(stream="metrics").size == found.size
    for descriptor in streams:
        os.close(descriptor)


def test_of_old_reports_evenly_spaced_ones_are_kept(bench: Output, tmp_path: Path) -> None:
    streams = bench.reader.open(INCARNATION)
    for step in range(1000):
        bench.reader.keep_reports(INCARNATION, [report(step)])
    end = bench.read(-80, stream="metrics")
    assert b'"number":999' in end.data
    files = sorted(tmp_path.rglob("2.metrics.jsonl*"))
    assert [file.name.removeprefix("2.metrics.jsonl") for file in files] == ["", ".1", ".2", ".base"]
    assert all(file.stat().st_size <= 1000 for file in files)
    newest, newer, oldest = (
        [json.decode(line)["number"] for line in file.read_bytes().splitlines()] for file in files[:3]
    )
    assert oldest == list(range(0, oldest[-1] + 1, oldest[1]))
    assert len(oldest) >= 4
    assert newer + newest == list(range(newer[0], 1000)), "the newest are all there"
    assert oldest[-1] + oldest[1] >= newer[0]
    for descriptor in streams:
        os.close(descriptor)


def test_what_the_disk_does_not_take_is_not_kept_in_memory(bench: Output) -> None:
    """The thread that writes is busy, as if the disk did not answer."""
    streams = bench.reader.open(INCARNATION)
    goes_on = threading.Event()

    def block() -> None:
        goes_on.wait(100)

    bench.reader._order(block)
    text = "x" * 200
    many = [report(0, metrics={str(name): text for name in range(100)})] * 300
    for _ in range(30):
        bench.reader.keep_reports(INCARNATION, many)
    assert bench.reader._num_given < 9 * MAX_SERIES_BYTES
    bench.reader.keep_reports(INCARNATION, many * 2)
    goes_on.set()
    bench.read(stream="metrics")
    before = bench.reader._num_given
    assert bench.reader._num_written == before
    bench.reader.keep_reports(INCARNATION, [report(7)])
    assert bench.read(-12, stream="metrics").data == b'"number":7}\n'
    for descriptor in streams:
        os.close(descriptor)


def fill(descriptor: int, size: int) -> None:
    """Print so much in lines of ten bytes, from a thread, as the pipe may be full."""
    everything = b"".join(b"%09d\n" % number for number in range(size // 10))

    def write() -> None:
        view = memoryview(everything)
        while view:
            view = view[os.write(descriptor, view) :]
        os.close(descriptor)

    threading.Thread(target=write, daemon=True).start()


def test_a_reader_that_wants_everything_gets_it_however_fast_the_worker_prints(bench: Output, tmp_path: Path) -> None:
    out, err = bench.reader.open(INCARNATION, FOLLOWED)
    size = 500_000
    fill(out, size)
    seen = b""
    while len(seen) < size:
        found = bench.read(len(seen), keep=True, max_bytes=700)
        assert found.offset == len(seen)
        seen += found.data
    assert seen == b"".join(b"%09d\n" % number for number in range(size // 10))
    assert (
        sum(file.stat().st_size for file in tmp_path.rglob("2.out*") if file.suffix not in (".base", ".times")) <= 3000
    )
    os.close(err)


def test_what_is_in_the_pipe_at_the_end_is_kept_for_that_reader_too(bench: Output) -> None:
    out, err = bench.reader.open(INCARNATION, FOLLOWED)
    everything = b"".join(b"%09d\n" % number for number in range(10_000))
    os.write(out, everything)
    bench.reader.finish(INCARNATION, -9)
    bench.next()
    assert bench.everything(keep=True) == everything
    os.close(out)
    os.close(err)


def test_a_reader_that_asks_no_more_is_not_waited_for(tmp_path: Path) -> None:
    now = [100.0]
    bench = Output(tmp_path, clock=lambda: now[0])
    out, err = bench.reader.open(INCARNATION, FOLLOWED)
    fill(out, 1_000_000)
    while len(bench.everything()) < 3000:  # three files are full, and the worker waits
        pass
    assert bench.read(0, keep=True).size == 3000
    now[0] += KEEP_S + 1
    while (found := bench.read(-1)).size < 1_000_000:  # whatever it is asked, it looks at the clock
        pass
    assert found.data == b"\n"
    bench.reader.close()
    os.close(err)


def test_the_end_of_a_fault_is_left_out_of_the_last_lines(tmp_path: Path) -> None:
    (tmp_path / "err").write_text(f"Fatal\n  File x, line 3\n\nExtension modules: {', '.join(['numpy'] * 500)}\n")
    assert last_lines(tmp_path / "err") == "Fatal\n  File x, line 3\n"


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o277], ids=oct)
def test_output_is_for_its_user_alone_and_a_copy_for_whom_the_umask_says(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        for name, is_private in (("own", True), ("copy", False)):
            LogFile(tmp_path / name / "job/0.out", 100, 2, is_private=is_private).close()
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("own", "own/job", "own/job/0.out", "copy/job/0.out")]
    assert modes == [0o700, 0o700, 0o600, 0o666 & ~umask]


def test_what_was_printed_since_a_time_is_read_from_the_beginning_of_its_line(tmp_path: Path) -> None:
    bench = Output(tmp_path)
    out, err = bench.reader.open(INCARNATION)
    os.write(out, b"early\nhalf a ")
    bench.read_until(b"early\nhalf a ")
    time.sleep(1.5)  # one record of time a second
    between = time.time()
    os.write(out, b"line\nlate\n")
    bench.read_until(b"early\nhalf a line\nlate\n")
    found = bench.read(since=between)
    assert (found.data, found.offset) == (b"half a line\nlate\n", 6)
    assert bench.read(until=between).data == b"early\nhalf a "
    assert bench.read(since=between + 100).data == b""
    assert bench.read(since=between, grep="l").data == b"half a line\nlate\n"
    assert bench.read(until=between, grep="a").data == b"early\nhalf a \n"
    os.close(out)
    os.close(err)
    bench.reader.close()
