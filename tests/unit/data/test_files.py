"""Data files: the order of their names, formats, globs, and the rows that a range of samples is."""

import glob
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.data_files import assign_files
from unified.coordinator.core.file_layout import FileLayout, FileRows
from unified.data.files import RowOffsetIndex, format_of, matches, natural_key, of_format
from unified.errors import DataFileNotFoundError, DatasetError
from unified.protocol.coordinator import FileRun

NAMES = st.lists(st.text("ab01/.", min_size=1, max_size=8), max_size=8)


def test_numbers_in_names_are_sorted_by_value_folder_by_folder() -> None:
    names = ["b/part-10", "b/part-9", "a10/x", "a2/x", "b/part-9-1", "part", "b"]
    assert sorted(names, key=natural_key) == ["a2/x", "a10/x", "b", "b/part-9", "b/part-9-1", "b/part-10", "part"]


@given(NAMES)
def test_the_order_depends_on_the_names_alone(names: list[str]) -> None:
    backwards = names[::-1]
    assert sorted(names, key=natural_key) == sorted(backwards, key=natural_key)
    assert len({repr(natural_key(name)) for name in names}) == len(set(names))  # no two of them are equal


@pytest.mark.parametrize(
    ("name", "format_"),
    [
        ("/d/a.parquet", "parquet"),
        ("s3://b/a.PQ", "parquet"),
        ("a.csv.gz", "csv"),
        ("train.tfrecord-00003-of-00016", "tfrecord"),
        ("a.tfrecords.gz", "tfrecord"),
        ("a.ndjson", "jsonl"),
        ("a.feather", "arrow"),
    ],
)
def test_a_name_tells_its_format(name: str, format_: str) -> None:
    assert format_of(name) == format_


def test_a_name_that_tells_no_format_is_said_to() -> None:
    with pytest.raises(DatasetError, match=r"/d/part-0 .*format="):
        format_of("/d/part-0")


def test_hidden_and_marked_files_are_not_part_of_a_directory() -> None:
    names = ["a.csv", "_tmp/b.csv", ".x.csv", "c/.d/e.csv", "c/f.csv", "_SUCCESS"]
    assert of_format(names, "csv", "/d") == ["a.csv", "c/f.csv"]


def test_a_directory_of_another_format_says_what_is_there() -> None:
    with pytest.raises(DataFileNotFoundError, match=r"/d holds no parquet files .*b\.csv"):
        of_format(["b.csv", "c.csv"], "parquet", "/d")


@pytest.mark.parametrize(
    "pattern", ["*", "**", "a/*", "**/*.csv", "a/**/c.csv", "a*/**", "*/b/[cd].csv", "**/b/**", "?/?.csv", ".h/*"]
)
def test_globs_in_buckets_mean_what_they_mean_here(pattern: str, tmp_path: Path) -> None:
    names = ["a/b/c.csv", "a/c.csv", "a/b/d.csv", "x.csv", "ab/y", ".h/c.csv", "a/.h.csv", "a/b/c/d.csv"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    expected = {
        each for each in glob.glob(pattern, root_dir=tmp_path, recursive=True) if os.path.isfile(tmp_path / each)
    }

    assert {name for name in names if matches(name.split("/"), pattern.split("/"))} == expected
    assert expected


SIZES = st.lists(st.integers(0, 12), max_size=12)


def rows_of(found: list[FileRows]) -> list[tuple[int, int]]:
    return [(rows.file, row) for rows in found for row in range(rows.start, rows.end)]


@given(SIZES, st.integers(0, 150), st.integers(0, 150))
def test_a_range_of_samples_is_the_same_range_of_all_rows(sizes: list[int], start: int, end: int) -> None:
    layout = FileLayout(sizes)
    rows = [(file, row) for file, size in enumerate(sizes) for row in range(size)]

    found = layout.locate(start, end)

    assert rows_of(found) == rows[start:end]
    assert all(part.start < part.end for part in found)
    assert layout.total_samples == len(rows)


@given(SIZES, st.integers(1, 20))
def test_shards_hold_every_row_once_whatever_the_sizes_of_files_and_shards(sizes: list[int], shard_size: int) -> None:
    layout = FileLayout(sizes)
    total = layout.total_samples

    served = [
        row
        for start in range(0, total, shard_size)
        for row in rows_of(layout.locate(start, min(start + shard_size, total)))
    ]

    assert served == [(file, row) for file, size in enumerate(sizes) for row in range(size)]


@given(SIZES, st.integers(0, 150), st.integers(0, 150))
def test_an_assignment_says_which_rows_without_the_sizes_of_the_other_files(
    sizes: list[int], start: int, end: int
) -> None:
    """What a reader does with it: from `first_row` on, on through the files, until it has enough."""
    runs = [FileRun(path=f"/{file}", num_samples=size) for file, size in enumerate(sizes)]
    total = sum(sizes)
    start, end = min(start, total), min(max(start, end), total)
    assignment = assign_files(runs, 7, start, end)

    rows = [(path, row) for path in assignment.file_paths for row in range(sizes[int(path[1:])])]
    read = rows[assignment.first_row :][: assignment.end_sample - assignment.start_sample]

    assert read == [(run.path, row) for run in runs for row in range(run.num_samples)][start:end]


def test_a_file_without_rows_is_not_named() -> None:
    assert FileLayout([2, 0, 0, 3]).locate(1, 4) == [FileRows(0, 1, 2), FileRows(3, 0, 2)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 7), st.data())
def test_a_mark_is_the_nearest_noted_row_and_where_it_begins(
    lengths: list[int], every: int, data: st.DataObject
) -> None:
    row_offsets = RowOffsetIndex(every)
    offsets = [sum(lengths[:row]) for row in range(len(lengths))]
    passed = data.draw(st.integers(0, len(lengths)))
    for _ in range(2):  # passing rows again changes nothing
        for row in range(passed):
            row_offsets.note(row, offsets[row])

    wanted = data.draw(st.integers(0, len(lengths) - 1))
    row, offset = row_offsets.before(wanted)

    assert offset == offsets[row]
    assert row == min(wanted // every, max(passed - 1, 0) // every) * every


def test_without_a_mark_reading_begins_at_the_first_row() -> None:
    assert RowOffsetIndex().before(1000, 17) == (0, 17)
