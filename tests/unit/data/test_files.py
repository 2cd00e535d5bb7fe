"""Names of data files: their order, their formats, and globs."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unified.data.files import format_of, matches, natural_key, of_format
from unified.errors import DataFileNotFoundError, DatasetError

NAMES = st.lists(st.text("ab01/.", min_size=1, max_size=8), max_size=8)


def test_numbers_in_names_are_sorted_by_value_folder_by_folder() -> None:
    names = ["b/part-10", "b/part-9", "a10/x", "a2/x", "b/part-9-1", "part", "b"]
    assert sorted(names, key=natural_key) == ["a2/x", "a10/x", "b", "b/part-9", "b/part-9-1", "b/part-10", "part"]


@settings(deadline=None)
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
