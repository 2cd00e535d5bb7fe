"""Thinning of old points: evenly spaced, never without the first, whole points, and always within the size."""

import random
from pathlib import Path

import pytest
from msgspec import json

from unified.protocol.records import WorkerReport
from unified_agent.logs.series import SeriesFile, thinned


def lines(*numbers: int, text: str = "") -> bytes:
    report = [WorkerReport(at=1.0, step=number, total=None, metrics={"m": text}, number=number) for number in numbers]
    return b"".join(json.encode(each) + b"\n" for each in report)


def numbers(data: bytes) -> list[int]:
    return [json.decode(line)["number"] for line in data.splitlines()]


def test_the_stride_grows_as_little_as_it_can_and_never_shrinks() -> None:
    size = len(lines(*range(100, 110)))
    once, stride = thinned(lines(*range(20)), 1, size)
    assert (numbers(once), stride) == (list(range(0, 20, 2)), 2)
    assert (numbers(thinned(lines(*range(10)), 1, size)[0])) == list(range(10))
    again, stride = thinned(once + lines(*range(20, 30)), stride, size)
    assert (numbers(again), stride) == (list(range(0, 30, 4)), 4)
    assert (numbers(thinned(lines(*range(10)), 4, size)[0])) == [0, 4, 8]
    assert thinned(b"", 1, size) == (b"", 1)


def test_points_in_parts_are_kept_or_left_out_as_a_whole() -> None:
    assert numbers(thinned(lines(0, 1, 1, 2, 2, 2, 3, 3, 4, 5), 1, len(lines(*range(6))))[0]) == [0, 2, 2, 2, 4]


@pytest.mark.parametrize("number", [0, 1, 2**62])
def test_what_is_no_series_is_bounded_as_well(number: int) -> None:
    """A worker is free to write into its files, and may number its points as it likes."""
    found, _ = thinned(lines(*[number] * 100) + b"no json\n" + b"\xff" * 5000, 1, 1000)
    assert len(found) <= 1000
    assert set(numbers(found)) <= {number}
    assert thinned(lines(0, text="x" * 5000), 1, 1000)[0] == b""


@pytest.mark.parametrize("max_files", [2, 3, 5])
@pytest.mark.parametrize("seed", range(3))
def test_files_are_bounded_whatever_is_written(max_files: int, seed: int, tmp_path: Path) -> None:
    random_numbers = random.Random(seed)
    file = SeriesFile(tmp_path / "0.metrics.jsonl", 2000, max_files)
    written = 0
    while written < 500:
        count = random_numbers.choice([1, 1, 3, 7])
        file.write_lines(lines(*range(written, written + count), text="x" * random_numbers.choice([0, 5, 90])))
        written += count
    file.close()
    parts = [tmp_path / f"0.metrics.jsonl{end}" for end in ("", *(f".{number}" for number in range(1, max_files)))]
    assert all(part.stat().st_size <= 2000 for part in parts)
    kept = [number for part in reversed(parts) for number in numbers(part.read_bytes())]
    assert kept == sorted(set(kept))
    assert (kept[0], kept[-1]) == (0, written - 1)
    whole = len(numbers(b"".join(part.read_bytes() for part in parts[:-1])))
    assert kept[-whole:] == list(range(written - whole, written))
    assert not (tmp_path / f"0.metrics.jsonl.{max_files}").exists()
