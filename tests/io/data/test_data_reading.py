"""Finding the files of a dataset, counting them, and reading shards of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.data_files import WRITERS, assign_files, plain, samples, write_csv, write_jsonl, write_parquet
from unified.data.reading import ShardReader, find_runs, iter_samples
from unified.errors import DataFileNotFoundError, DatasetError, UsageError
from unified.protocol.coordinator import FileRun, ShardAssignment

SIZES = [3, 10, 1, 25]


def write_dataset(directory: Path, kind: str, sizes: list[int] = SIZES) -> str:
    """Files ``part-0`` to ``part-10`` and so on; returns the format."""
    format_, suffix, write = WRITERS[kind]
    start = 0
    for number, size in zip(range(8, 8 + len(sizes)), sizes, strict=True):  # past 9: natural order matters
        write(directory / f"part-{number}{suffix}", samples(start, start + size))
        start += size
    return format_


def read(assignments: list[ShardAssignment], format_: str) -> list[list[int]]:
    return [[plain(format_, row)["number"] for row in iter_samples(each)] for each in assignments]


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("shard_size", [1, 4, 12, 100])
def test_shards_of_a_directory_are_all_of_its_samples_once(kind: str, shard_size: int, tmp_path: Path) -> None:
    format_ = write_dataset(tmp_path, kind)
    runs = find_runs(str(tmp_path), format_)
    assert [run.num_samples for run in runs] == SIZES

    bounds = [(start, min(start + shard_size, 39)) for start in range(0, 39, shard_size)]
    shards = [assign_files(runs, number, start, end) for number, (start, end) in enumerate(bounds)]

    assert read(shards, format_) == [list(range(start, end)) for start, end in bounds]


@pytest.mark.parametrize("kind", ["parquet", "tfrecord", "csv"])
def test_reading_goes_on_after_any_sample_of_a_shard(kind: str, tmp_path: Path) -> None:
    format_ = write_dataset(tmp_path, kind)
    shard = assign_files(find_runs(str(tmp_path), format_), 0, 2, 30)
    with ShardReader() as reader:
        for skip in range(29):
            numbers = [plain(format_, row)["number"] for row in reader.iter_samples(shard, skip)]
            assert numbers == list(range(2 + skip, 30))


def test_a_directory_gives_the_files_of_its_format_and_of_its_folders(tmp_path: Path) -> None:
    for name in ["b/part-10.csv", "b/part-9.csv", "_tmp/c.csv", "a.jsonl", ".hidden.csv", "z.csv"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_csv(tmp_path / name, samples(0, 1))

    def found(**options: str) -> list[str]:
        return [os.path.relpath(run.path, tmp_path) for run in find_runs(str(tmp_path), "csv", **options)]  # type: ignore[arg-type]

    assert found() == ["b/part-9.csv", "b/part-10.csv", "z.csv"]
    assert found(order="lexical") == ["b/part-10.csv", "b/part-9.csv", "z.csv"]
    with pytest.raises(UsageError, match="'natural' or 'lexical'"):
        found(order="random")


def test_a_glob_and_a_single_file_are_taken_whatever_their_suffix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").mkdir()
    for name in ["a.data", "x/b.data", "c.other"]:
        write_csv(tmp_path / name, samples(0, 2))
    monkeypatch.chdir(tmp_path)

    assert find_runs("**/*.data", "csv") == [
        FileRun(path=str(tmp_path / name), num_samples=2) for name in ["a.data", "x/b.data"]
    ]
    assert find_runs("./c.other", "csv") == [FileRun(path=str(tmp_path / "c.other"), num_samples=2)]


def test_links_are_followed_unless_they_lead_back(tmp_path: Path) -> None:
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    write_csv(tmp_path / "data" / "sub" / "a.csv", samples(0, 1))
    write_csv(tmp_path / "other" / "b.csv", samples(0, 1))
    (tmp_path / "data" / "other").symlink_to(tmp_path / "other")
    for number, target in enumerate([tmp_path, tmp_path / "data", tmp_path / "data" / "sub"]):
        (tmp_path / "data" / "sub" / f"back-{number}").symlink_to(target)

    assert [os.path.relpath(run.path, tmp_path) for run in find_runs(str(tmp_path / "data"), "csv")] == [
        "data/other/b.csv",
        "data/sub/a.csv",
    ]


def test_a_name_with_brackets_is_a_name_where_there_is_one(tmp_path: Path) -> None:
    write_csv(tmp_path / "a[1].csv", samples(0, 2))
    assert find_runs(str(tmp_path / "a[1].csv"), "csv")[0].num_samples == 2


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("nothing", "nothing is not there"),
        ("*.csv", r"no file matches .*\*\.csv"),
        ("", "holds no csv files.*it is empty"),
    ],
)
def test_a_path_without_files_is_named(path: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=error) as raised:
        find_runs(str(tmp_path / path), "csv")
    assert isinstance(raised.value, DataFileNotFoundError)


def test_one_bad_file_of_many_is_named(tmp_path: Path) -> None:
    for number in range(20):
        write_parquet(tmp_path / f"{number}.parquet", samples(0, 5))
    (tmp_path / "13.parquet").write_bytes(b"PAR1 and no more PAR1")
    with pytest.raises(DatasetError, match=r"/13\.parquet cannot be read as parquet"):
        find_runs(str(tmp_path), "parquet")


def test_files_without_any_row_are_no_dataset_but_one_among_others_is_borne(tmp_path: Path) -> None:
    write_parquet(tmp_path / "0.parquet", [])
    with pytest.raises(DatasetError, match="has no sample in any of its 1 parquet files"):
        find_runs(str(tmp_path), "parquet")
    write_parquet(tmp_path / "1.parquet", samples(0, 2))
    runs = find_runs(str(tmp_path), "parquet")
    assert [row["number"] for row in iter_samples(assign_files(runs, 0, 0, 2))] == [0, 1]


def test_files_that_shrank_after_registration_are_told(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", samples(0, 10))
    shard = assign_files(find_runs(str(tmp_path), "jsonl"), 4, 5, 10)
    write_jsonl(tmp_path / "a.jsonl", samples(0, 8))

    reading = iter_samples(shard)
    assert [next(reading)["number"] for _ in range(3)] == [5, 6, 7]
    with pytest.raises(DatasetError, match=r"a\.jsonl end 2 samples before shard 4 does: they were changed"):
        next(reading)


def test_an_assignment_whose_files_nobody_counted_is_refused() -> None:
    with pytest.raises(DatasetError, match="shard 3 names no files: register"):
        list(iter_samples(ShardAssignment(shard_id=3, file_paths=[], start_sample=0, end_sample=5)))


def test_importing_it_loads_no_reader_of_formats() -> None:
    code = (
        "import sys, unified.data; from unified.data import find_runs, iter_samples;"
        "print({'torch', 'numpy', 'pyarrow', 'boto3'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a.parquet", samples(0, 1))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)  # what an import of what is not there does
    with pytest.raises(ImportError, match=r"pip install 'unified-runtime\[data\]'"):
        find_runs(str(tmp_path), "parquet")
