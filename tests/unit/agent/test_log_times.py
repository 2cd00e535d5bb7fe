"""Offsets of a log by time: what was written from one time to another, in little room."""

import sys
from pathlib import Path

from unified.protocol.records import LOG_TIME
from unified_agent.logs.times import MAX_RECORDS, TimeIndex, range_of, times_of, times_path

EVERYTHING = (0, sys.maxsize)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def index(tmp_path: Path, *writes: tuple[float, int]) -> Path:
    """Return the path of a log to which something was written at these times, at these offsets."""
    clock = Clock()
    times = TimeIndex(tmp_path / "0.out", clock)
    for clock.now, offset in writes:
        times.note(offset)
    return tmp_path / "0.out"


def test_a_range_holds_all_that_was_written_in_that_time(tmp_path: Path) -> None:
    log = index(tmp_path, (1000.0, 0), (1000.05, 10), (1010.0, 20), (1020.0, 30))
    assert range_of(log, 0, 0) == EVERYTHING
    assert range_of(log, 1005, 0) == (20, sys.maxsize)
    assert range_of(log, 1000.09, 0) == (0, sys.maxsize)  # bytes from 10 on may be of that time
    assert range_of(log, 1005, 1012) == (20, 30)
    assert range_of(log, 0, 1019) == (0, 30)
    assert range_of(log, 0, 999) == (0, 0)
    assert range_of(log, 1030, 0)[0] == sys.maxsize


def test_times_of_a_part_begin_with_the_last_before_it(tmp_path: Path) -> None:
    log = index(tmp_path, (1000.0, 0), (1010.0, 20), (1020.0, 30), (1005.0, 40))

    def times(start: int, end: int) -> list[tuple[int, float]]:
        return list(LOG_TIME.iter_unpack(times_of(log, start, end)))

    assert times(0, 20) == [(0, 1000.0)]
    assert times(0, 21) == times(19, 21) == [(0, 1000.0), (20, 1010.0)]
    assert times(20, 100) == [(20, 1010.0), (30, 1020.0), (40, 1005.0)]
    assert times(99, 100) == [(40, 1005.0)]
    assert times_of(tmp_path / "1.out", 0, 100) == b""


def test_a_log_without_an_index_is_read_whole(tmp_path: Path) -> None:
    assert range_of(tmp_path / "0.out", 1005, 1006) == EVERYTHING


def test_times_of_what_was_rotated_away_are_dropped(tmp_path: Path) -> None:
    clock = Clock()
    times = TimeIndex(tmp_path / "0.out", clock)
    for offset in range(0, 1000, 10):
        clock.now += 5
        times.note(offset)
    size = times_path(tmp_path / "0.out").stat().st_size
    times.forget(505)
    assert times_path(tmp_path / "0.out").stat().st_size <= size * 0.52
    assert range_of(tmp_path / "0.out", 1000 + 5 * 81, 0) == (800, sys.maxsize)
    assert range_of(tmp_path / "0.out", 1, 0) == (500, sys.maxsize)


def test_a_log_of_days_has_a_small_index_that_is_less_exact(tmp_path: Path) -> None:
    clock = Clock()
    times = TimeIndex(tmp_path / "0.out", clock)
    for second in range(MAX_RECORDS + 1000):
        clock.now = 1000.0 + second
        times.note(second * 10)
    assert times_path(tmp_path / "0.out").stat().st_size < (MAX_RECORDS + 2) * 16
    start, _ = range_of(tmp_path / "0.out", 1000.0 + 40_000, 0)
    assert 40_000 * 10 - 20 <= start <= 40_000 * 10


def test_a_clock_that_is_put_back_loses_nothing(tmp_path: Path) -> None:
    log = index(tmp_path, (1000.0, 0), (2000.0, 10), (900.0, 20))
    assert range_of(log, 1500, 0)[0] == 10
    assert range_of(log, 950, 0)[0] == 0
