"""A cursor over one stream: lines, skips, ends."""

from __future__ import annotations

import pytest

from unified.client.logs import CHUNK_BYTES, IDLE_PAUSE_S, LIVE_PAUSE_S, StreamCursor
from unified.protocol.client_master import LogChunk


def cursor(*, is_live: bool = True, offset: int = 0) -> StreamCursor:
    return StreamCursor("trainer_1-0_1-0", 0, "out", "trainer-0", is_live=is_live, offset=offset)


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
    stream = cursor()
    assert stream.take(chunk(b"one\ntw"), 0.0) == ["[trainer-0] one"]
    assert stream.take(chunk(b"o\nthree", 6), 0.0) == ["[trainer-0] two"]
    assert stream.take(chunk(b"", 13, is_final=True), 0.0) == ["[trainer-0] three"]
    assert stream.is_final


def test_a_character_cut_in_two_is_put_together() -> None:
    first, second = "é\n".encode()[:1], "é\n".encode()[1:]
    stream = cursor()
    assert stream.take(chunk(first), 0.0) == []
    assert stream.take(chunk(second, 1), 0.0) == ["[trainer-0] é"]


def test_what_a_progress_bar_drew_over_is_left_out() -> None:
    assert cursor().take(chunk(b"10%\r20%\r30%\nend\r\n"), 0.0) == ["[trainer-0] 30%", "[trainer-0] end"]


def test_a_line_without_an_end_does_not_grow_for_ever() -> None:
    stream = cursor()
    assert stream.take(chunk(b"x" * CHUNK_BYTES), 0.0) == ["[trainer-0] " + "x" * CHUNK_BYTES]
    assert stream.flush() == []


def test_a_live_reader_far_behind_skips_and_says_so() -> None:
    stream = cursor()
    size = 95_000_000
    lines = stream.take(chunk(b"first\nhalf a li", size=size), 0.0)
    target = size - CHUNK_BYTES
    assert lines == ["[trainer-0] first", "[trainer-0] … 95 MB skipped, whole log: /logs/0.out"]
    assert stream.request("job").offset == target
    rest = b"ne cut off\nlast\n"
    assert stream.take(chunk(rest, target, size), 0.0) == ["[trainer-0] last"]


def test_a_reader_that_is_not_live_skips_nothing() -> None:
    stream = cursor(is_live=False)
    assert stream.take(chunk(b"a\n", size=95_000_000), 0.0) == ["[trainer-0] a"]
    assert stream.request("job").offset == 2
    assert not stream.is_caught_up


def test_what_was_rotated_away_is_said() -> None:
    assert cursor().take(chunk(b"a\n", 5000), 0.0) == [
        "[trainer-0] … 5 kB skipped, whole log: /logs/0.out",
        "[trainer-0] a",
    ]


def test_what_was_begun_before_a_gap_does_not_go_on_behind_it() -> None:
    stream = cursor()
    assert stream.take(chunk(b"one\nhalf a li"), 0.0) == ["[trainer-0] one"]
    assert stream.take(chunk(b"two\n", 5000), 0.0) == [
        "[trainer-0] half a li",
        "[trainer-0] … 4.99 kB skipped, whole log: /logs/0.out",
        "[trainer-0] two",
    ]


def test_reading_what_is_there_ends_although_more_is_printed_all_the_while() -> None:
    stream = cursor(is_live=False)
    stream.take(chunk(b"x" * 10 + b"\n", size=20), 0.0)
    assert not stream.is_caught_up
    stream.take(chunk(b"y" * 10 + b"\n", 11, size=5000), 0.0)
    assert stream.is_caught_up
    stream.take(chunk(b"z\n", 22, size=5000, is_final=True), 0.0)
    assert not stream.is_final


@pytest.mark.parametrize(("start", "expected"), [(0, ["[trainer-0] cut", "[trainer-0] b"]), (50, ["[trainer-0] b"])])
def test_a_tail_begins_at_a_whole_line(start: int, expected: list[str]) -> None:
    stream = cursor(is_live=False, offset=-100)
    assert stream.request("job").offset == -100
    assert stream.take(chunk(b"cut\nb\n", start), 0.0) == expected


def test_an_idle_stream_is_asked_less_and_less_often_up_to_a_limit() -> None:
    stream = cursor()
    stream.take(chunk(b"a\n"), 100.0)
    assert stream.due_at == 100.0 + LIVE_PAUSE_S
    for _ in range(20):
        stream.nothing(200.0)
    assert stream.due_at == 200.0 + IDLE_PAUSE_S
