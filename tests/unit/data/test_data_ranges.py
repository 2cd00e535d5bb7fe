"""Which rows of which files a range of samples is."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.data_files import assign_files
from unified.core.file_layout import FileLayout, FileRows
from unified.data.files import RowOffsetIndex
from unified.protocol.coordinator import FileRun

SIZES = st.lists(st.integers(0, 12), max_size=12)


def rows_of(found: list[FileRows]) -> list[tuple[int, int]]:
    return [(rows.file, row) for rows in found for row in range(rows.start, rows.end)]


@settings(deadline=None)
@given(SIZES, st.integers(0, 150), st.integers(0, 150))
def test_a_range_of_samples_is_the_same_range_of_all_rows(sizes: list[int], start: int, end: int) -> None:
    layout = FileLayout(sizes)
    rows = [(file, row) for file, size in enumerate(sizes) for row in range(size)]

    found = layout.locate(start, end)

    assert rows_of(found) == rows[start:end]
    assert all(part.start < part.end for part in found)
    assert layout.total_samples == len(rows)


@settings(deadline=None)
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


@settings(deadline=None)
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


@settings(deadline=None)
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
