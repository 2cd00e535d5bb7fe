"""A cursor over one stream: text, skips, ends; and the lines that are made of it."""

import tempfile
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.support.fake_master import worker_status
from unified.client import logs
from unified.client.logs import (
    CHUNK_BYTES,
    IDLE_PAUSE_S,
    KEEP_CHUNK_BYTES,
    LIVE_PAUSE_S,
    QUIET_S,
    LineFilter,
    LineView,
    LogFilter,
    LogReader,
    Mode,
    Output,
    OutputSource,
    StreamCursor,
)
from unified.protocol.client_master import JobStatus, LogChunk, ReadLog, RoleStatus
from unified.protocol.records import LOG_TIME, Stage
from unified_agent.logs.times import times_of

SOURCE = OutputSource("[trainer-0] ", "out")


class Lines:
    """What a cursor says, as lines."""

    def __init__(self, cursor: StreamCursor) -> None:
        self.cursor = cursor
        self.view = LineView()

    def take(self, chunk: LogChunk, now: float) -> list[str]:
        return self.view.feed(self.cursor.take(chunk, now))


def cursor(*, mode: Mode = "live", offset: int = 0) -> StreamCursor:
    return StreamCursor("trainer_1-0_1-0", 0, SOURCE, mode=mode, offset=offset)


def lines(*, mode: Mode = "live", offset: int = 0) -> Lines:
    return Lines(cursor(mode=mode, offset=offset))


def chunk(data: bytes, offset: int = 0, size: int | None = None, *, is_final: bool = False) -> LogChunk:
    following = offset + len(data)
    return LogChunk(
        worker="trainer_1-0_1-0",
        incarnation=0,
        data=data,
        offset=offset,
        next_offset=following,
        size=following if size is None else size,
        is_final=is_final,
        path="/logs/0.out",
    )


def test_lines_are_whole_and_carry_the_worker() -> None:
    stream = lines()
    assert stream.take(chunk(b"one\ntw"), 0.0) == ["[trainer-0] one"]
    assert stream.take(chunk(b"o\nthree", 6), 0.0) == ["[trainer-0] two"]
    assert stream.take(chunk(b"", 13, is_final=True), 0.0) == ["[trainer-0] three"]
    assert stream.cursor.is_final


def test_a_character_cut_in_two_is_put_together() -> None:
    first, second = "é\n".encode()[:1], "é\n".encode()[1:]
    stream = lines()
    assert stream.take(chunk(first), 0.0) == []
    assert stream.take(chunk(second, 1), 0.0) == ["[trainer-0] é"]


def test_what_a_progress_bar_drew_over_is_left_out() -> None:
    assert lines().take(chunk(b"10%\r20%\r30%\nend\r\n"), 0.0) == ["[trainer-0] 30%", "[trainer-0] end"]


def test_a_line_without_an_end_does_not_grow_for_ever() -> None:
    stream = lines()
    assert stream.take(chunk(b"x" * CHUNK_BYTES), 0.0) == ["[trainer-0] " + "x" * CHUNK_BYTES]
    assert stream.view.flush() == []


def test_a_live_reader_far_behind_skips_and_says_so() -> None:
    stream = lines()
    size = 95_000_000
    said = stream.take(chunk(b"first\nhalf a li", size=size), 0.0)
    target = size - CHUNK_BYTES
    assert said == ["[trainer-0] first", "[trainer-0] half a li", "[trainer-0] … 95 MB skipped, whole log: /logs/0.out"]
    assert stream.cursor.request("job").offset == target
    rest = b"ne cut off\nlast\n"
    assert stream.take(chunk(rest, target, size), 0.0) == ["[trainer-0] last"]


def test_a_reader_that_is_not_live_skips_nothing() -> None:
    stream = cursor(mode="once")
    assert stream.take(chunk(b"a\n", size=95_000_000), 0.0) == [Output(SOURCE, "a\n")]
    assert stream.request("job").offset == 2
    assert not stream.is_caught_up


def test_what_was_rotated_away_is_said() -> None:
    found = lines().take(chunk(b"a\n", 5000), 0.0)
    assert found == ["[trainer-0] … 5 kB skipped, whole log: /logs/0.out", "[trainer-0] a"]


def test_what_was_begun_before_a_gap_does_not_go_on_behind_it() -> None:
    stream = lines()
    assert stream.take(chunk(b"one\nhalf a li"), 0.0) == ["[trainer-0] one"]
    expected = ["[trainer-0] half a li", "[trainer-0] … 4.99 kB skipped, whole log: /logs/0.out", "[trainer-0] two"]
    assert stream.take(chunk(b"two\n", 5000), 0.0) == expected


def test_reading_what_is_there_ends_although_more_is_printed_all_the_while() -> None:
    stream = cursor(mode="once")
    stream.take(chunk(b"x" * 10 + b"\n", size=20), 0.0)
    assert not stream.is_caught_up
    stream.take(chunk(b"y" * 10 + b"\n", 11, size=5000), 0.0)
    assert stream.is_caught_up
    stream.take(chunk(b"z\n", 22, size=5000, is_final=True), 0.0)
    assert not stream.is_final


@pytest.mark.parametrize(("start", "expected"), [(0, ["[trainer-0] cut", "[trainer-0] b"]), (50, ["[trainer-0] b"])])
def test_a_tail_begins_at_a_whole_line(start: int, expected: list[str]) -> None:
    stream = lines(mode="once", offset=-100)
    assert stream.cursor.request("job").offset == -100
    assert stream.take(chunk(b"cut\nb\n", start), 0.0) == expected


def test_an_idle_stream_is_asked_less_and_less_often_up_to_a_limit() -> None:
    stream = cursor()
    stream.take(chunk(b"a\n"), 100.0)
    assert stream.due_at == 100.0 + LIVE_PAUSE_S
    for _ in range(20):
        stream.nothing(200.0)
    assert stream.due_at == 200.0 + IDLE_PAUSE_S


def test_a_reader_that_keeps_asks_for_much_and_has_what_follows_kept() -> None:
    stream = cursor(mode="keep")
    stream.take(chunk(b"a\n", size=95_000_000), 0.0)
    request = stream.request("job")
    assert (request.offset, request.max_bytes, request.keep) == (2, KEEP_CHUNK_BYTES, True)
    assert stream.due_at == 0.0  # there is more to read
    assert not cursor().request("job").keep


def test_a_line_that_does_not_go_on_is_said_to_be_quiet_once() -> None:
    stream = cursor()
    assert stream.take(chunk(b"50%"), 1.0) == [Output(SOURCE, "50%")]
    assert stream.take(chunk(b"", 3), 1.1) == []
    assert stream.take(chunk(b"", 3), 1.0 + QUIET_S) == [Output(SOURCE, is_quiet=True)]
    assert stream.take(chunk(b"", 3), 9.0) == []
    assert stream.take(chunk(b" done\n", 3), 9.1) == [Output(SOURCE, " done\n")]
    assert stream.take(chunk(b"", 9), 19.0) == []


def test_bytes_that_are_no_text_come_out_as_they_came_in_where_everything_is_kept() -> None:
    stream = cursor(mode="keep")
    said = stream.take(chunk(b"\xff\xe2\x82"), 0.0) + stream.take(chunk(b"", 3, is_final=True), 0.0)
    assert "".join(output.text for output in said).encode("utf-8", "surrogateescape") == b"\xff\xe2\x82"
    assert said[-1].is_end


def test_what_was_begun_can_be_looked_at_while_it_grows() -> None:
    view = LineView()
    assert view.feed([Output(SOURCE, "one\n10%")]) == ["[trainer-0] one"]
    assert view.partials() == ["[trainer-0] 10%"]
    assert view.feed([Output(SOURCE, "\r20%")]) == []
    assert view.partials() == ["[trainer-0] 20%"]
    assert LineView(has_prefix=False).feed([Output(SOURCE, "bare\n")]) == ["bare"]


class TimedLogs:
    """A connection to a master that has whole logs with their times, in small parts."""

    def __init__(self, logs: dict[tuple[int, str], list[tuple[float, bytes]]], part: int = 20) -> None:
        self.part = part
        self.is_over = True
        self.folder = Path(tempfile.mkdtemp())
        self.num_reads = 0
        self.files: dict[tuple[int, str], bytes] = {}
        for (rank, stream), writes in logs.items():
            text, times = b"", LOG_TIME.pack(0, 0.1)
            for at, written in writes:
                times += LOG_TIME.pack(len(text), at) if at else b""
                text += written
            self.files[rank, stream], self.files[rank, f"{stream}.times"] = text, times

    def send(self, request: ReadLog) -> Any:
        self.num_reads += 1
        data = self.files.get((int(request.worker[-1]), request.stream), b"")
        offset = max(0, len(data) + request.offset) if request.offset < 0 else request.offset
        if request.stream.endswith("times"):
            (self.folder / "0.out.times").write_bytes(data)
            answer = chunk(times_of(self.folder / "0.out", offset, offset + request.max_bytes))
        else:
            answer = chunk(data[offset : offset + self.part], offset, len(data))
        return SimpleNamespace(
            result=lambda: msgspec.structs.replace(answer, is_final=self.is_over and answer.next_offset == len(data))
        )


def read_all(connection: Any, *, tail_bytes: int | None = None, **wanted: Any) -> list[str]:
    reader = LogReader(connection, "gpt-1", LogFilter(**wanted), tail_bytes=tail_bytes)
    reader.view.has_times = True
    workers = [worker_status(rank, name=f"trainer-{rank}") for rank in range(3)]
    reader.update(msgspec.structs.replace(ended(), workers=workers))
    return list(reader.rest())


def shown(at: float, line: str) -> str:
    return f"{datetime.fromtimestamp(at).isoformat(timespec='milliseconds')[:21]} {line}"


@pytest.mark.parametrize("part", [3, 20, 10_000])
def test_lines_of_several_streams_come_in_the_order_of_time(part: int) -> None:
    steps = [(1000.5 + rank / 5 + step, rank, step) for step in range(50) for rank in range(3)]
    written: dict[tuple[int, str], list[tuple[float, bytes]]] = {}
    for at, rank, step in steps:
        written.setdefault((rank, "out"), []).append((at, f"step {step}\n".encode()))
    written[1, "err"] = [(1020.1, b"a warning of "), (1020.3, b"two writes\n")]
    lines = [(at, shown(at, f"[trainer-{rank}] step {step}")) for at, rank, step in steps]
    lines.append((1020.3, shown(1020.3, "[trainer-1] a warning of two writes")))
    assert read_all(TimedLogs(written, part)) == [line for _, line in sorted(lines)]


def test_a_tail_has_its_times() -> None:
    written = {(rank, "out"): [(1000.0 + step, b"%04d\n" % step) for step in range(3000)] for rank in range(2)}
    expected = [shown(1000.0 + step, f"[trainer-{rank}] {step:04d}") for step in range(2997, 3000) for rank in range(2)]
    assert read_all(TimedLogs(written), tail_bytes=17) == expected


def test_a_log_without_times_holds_no_other_back() -> None:
    written = {(0, "out"): [(0.0, b"early\n" * 9)], (1, "out"): [(1000.0, b"one\n"), (1001.0, b"two\n")]}
    lines = read_all(TimedLogs(written))
    assert [line for line in lines if "early" in line] == [f"{'':21} [trainer-0] early"] * 9
    assert [line for line in lines if "early" not in line] == [
        shown(1000.0, "[trainer-1] one"),
        shown(1001.0, "[trainer-1] two"),
    ]


def test_a_clock_that_was_set_back_is_shown_as_it_was() -> None:
    written = {(0, "out"): [(5000.0, b"one\n"), (1400.0, b"two\n"), (1500.0, b"three\n")]}
    lines = [shown(at, f"[trainer-0] {text.decode().strip()}") for at, text in written[0, "out"]]
    assert read_all(TimedLogs(written, 4)) == lines


def test_what_comes_after_the_end_of_the_job_is_in_the_order_of_time() -> None:
    connection = TimedLogs({(0, "out"): [(1000.0, b"one\n")], (1, "out"): [(1001.0, b"two\n")]}, 100)
    connection.is_over = False
    reader = LogReader(connection, "gpt-1", mode="live")  # type: ignore[arg-type]
    reader.view.has_times = True
    workers = [worker_status(rank, name=f"trainer-{rank}") for rank in range(2)]
    running = msgspec.structs.replace(ended(), workers=workers, stage=Stage.RUNNING)
    reader.update(running)
    assert len(list(reader.read_present())) == 2
    for rank, at in ((0, 1003.0), (1, 1002.0)):
        connection.files[rank, "out.times"] += LOG_TIME.pack(4, at)
        connection.files[rank, "out"] += b"late\n"
    connection.is_over = True
    reader.update(msgspec.structs.replace(running, stage=Stage.STOPPED))
    assert list(reader.rest()) == [shown(1002.0, "[trainer-1] late"), shown(1003.0, "[trainer-0] late")]


def test_streams_that_lag_are_read_together() -> None:
    """As many requests are in flight as without an order."""
    written = {(rank, "out"): [(1000.0 + rank, b"x" * 99 + b"\n")] * 50 for rank in range(3)}
    connection: Any = TimedLogs(written, 100)
    reader = LogReader(connection, "gpt-1", LogFilter(streams=("out",)))
    reader.update(msgspec.structs.replace(ended(), workers=[worker_status(i, name=f"trainer-{i}") for i in range(3)]))
    list(reader.pull_lines())
    assert connection.num_reads == 6
    list(reader.pull_lines())
    assert connection.num_reads == 12


def test_one_stream_is_read_without_its_times_unless_they_are_shown() -> None:
    connection: Any = TimedLogs({(0, "out"): [(1000.0, b"one\n")]})
    reader = LogReader(connection, "gpt-1", LogFilter(streams=("out",)))
    reader.update(ended())
    assert list(reader.rest()) == ["[trainer-0] one"]
    assert connection.num_reads == 1


class SlowSearch:
    """A connection to a master whose agents search for long between two lines that match."""

    def __init__(self, size: int) -> None:
        self.size = size

    def send(self, request: ReadLog) -> "SlowSearch":
        self.request = request
        return self

    def result(self) -> LogChunk:
        time.sleep(0.02)
        following = min(self.request.offset + 1, self.size)
        data = b"the last line\n" if following == self.size else b""
        place: dict[str, Any] = {"offset": self.request.offset, "next_offset": following, "size": self.size}
        return LogChunk(worker="trainer_1-0_1-0", incarnation=0, data=data, is_final=True, **place)


def test_a_search_that_finds_nothing_for_long_goes_on_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "KEEP_DRAIN_S", 0.2)
    wanted = LogFilter(streams=("out",), lines=LineFilter(grep="last"))
    connection: Any = SlowSearch(30)  # of 0.6 s at least
    reader = LogReader(connection, "gpt-1", wanted)
    reader.update(ended())
    assert list(reader.rest()) == ["[trainer-0] the last line"]


def ended() -> JobStatus:
    role = RoleStatus(name="trainer", kind="elastic", total=1, is_driver=True)
    status: dict[str, Any] = {"job_id": "gpt-1", "name": "gpt", "stage": Stage.STOPPED, "reason": ""}
    return JobStatus(**status, roles=[role], workers=[worker_status()])


def test_a_line_that_has_not_ended_is_left_and_a_node_that_is_busy_is_asked_again() -> None:
    stream = StreamCursor("trainer_1-0_1-0", 0, SOURCE, lines=LineFilter(grep="x"))
    answer = msgspec.structs.replace(chunk(b"x\n", size=10), next_offset=7)
    stream.take(answer, 0.0)
    for is_busy in (True, False):
        stream.take(msgspec.structs.replace(answer, data=b"", offset=7, is_busy=is_busy), 0.0)
        assert stream.is_caught_up is not is_busy
    assert stream.request("job").offset == 7


@pytest.mark.parametrize("wanted", [LineFilter(since=1.0), LineFilter(until=1.0)])
def test_what_is_not_of_the_time_that_was_asked_for_is_not_said_to_be_missing(wanted: LineFilter) -> None:
    stream = StreamCursor("trainer_1-0_1-0", 0, SOURCE, lines=wanted)
    assert stream.take(chunk(b"", 5000), 0.0) == []


class KeptTail:
    """A master that has the end of a log whose node is gone, and itself as the reply."""

    def send(self, request: ReadLog) -> "KeptTail":
        return self

    def result(self) -> LogChunk:
        last = chunk(b"ab\nbc\n" + b"a" * 5000 + b"!\ncb\r\n", 100, is_final=True)
        return msgspec.structs.replace(last, note="node n1 is gone")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("b$", ["… node n1 is gone", "ab", "cb"]),
        ("(a+)+$", ["… node n1 is gone; the pattern takes too long for it: search for a simpler one"]),
    ],
)
def test_lines_of_a_kept_tail_are_searched_by_the_reader(
    pattern: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "SEARCH_WITHIN_S", 2.0)
    connection: Any = KeptTail()
    reader = LogReader(connection, "gpt-1", LogFilter(streams=("out",), lines=LineFilter(grep=pattern)))
    reader.update(ended())
    skipped = "… 100 bytes skipped, whole log: /logs/0.out"
    assert list(reader.rest()) == [f"[trainer-0] {line}" for line in [skipped, *expected]]
