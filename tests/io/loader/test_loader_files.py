"""`Dataset.from_files` finds and reads the files that a registered dataset of the same path consists of."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.data_files import WRITERS, assign_files, plain, samples, write_jsonl, write_parquet
from unified.data import ShardReader, find_runs
from unified.data.files import DataFiles
from unified.errors import DataFileNotFoundError, DatasetError, UsageError
from unified.loader.dataset import Dataset, find_parts
from unified.storage import open_storage

NAMES = ["part-1", "part-2", "part-10"]
TOTAL = 45


def write(folder: Path, kind: str) -> str:
    """Three files, which names in the order of letters would mix up. Returns their format."""
    format_, suffix, write_rows = WRITERS[kind]
    folder.mkdir()
    for number, name in enumerate(NAMES):
        write_rows(folder / f"{name}{suffix}", samples(15 * number, 15 * (number + 1)))
    (folder / "_SUCCESS").write_text("")
    return format_


@pytest.mark.parametrize("kind", WRITERS)
def test_both_readers_give_the_same_rows_in_the_same_order(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    format_ = write(folder, kind)
    for path in (str(folder), f"{folder}/part-*", f"{tmp_path}/**/part-*"):
        runs = find_runs(path, format_)
        with ShardReader(format_) as reader:
            registered = list(reader.iter_samples(assign_files(runs, 0, 0, TOTAL)))
        assert list(Dataset.from_files(path)) == list(Dataset.from_files(path, format_)) == registered
        assert [plain(format_, row) for row in registered] == samples(0, TOTAL)


def test_several_paths_come_in_the_order_given(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", samples(0, 3))
    write_parquet(tmp_path / "a.parquet", samples(3, 20))
    rows = Dataset.from_files([str(tmp_path / "b.jsonl"), str(tmp_path / "a.parquet")])
    assert list(rows) == list(rows.spread(2, local=True)) == samples(0, 20)
    pieces = find_parts(str(tmp_path / "a.parquet"))
    assert [(piece.start, piece.end) for piece in pieces] == [(0, 7), (7, 14), (14, 17)], "row groups are read apart"


def test_columns_in_the_order_that_was_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "data", "csv.gz")
    first: Any = next(iter(Dataset.from_files(str(tmp_path / "data"), columns=["half", "number"])))
    assert list(first.items()) == [("half", 0.0), ("number", 0)]
    with pytest.raises(UsageError, match="the files have no column 'm'; they have number, text, half"):
        Dataset.from_files(str(tmp_path / "data"), columns=["m"])


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", samples(0, 3))
    write_parquet(tmp_path / "a.parquet", samples(0, 3))
    (tmp_path / "odd").write_text("")
    with pytest.raises(DatasetError, match=r"files of several formats \(parquet, jsonl\): say which"):
        Dataset.from_files(str(tmp_path))
    assert list(Dataset.from_files(str(tmp_path), "json")) == samples(0, 3)
    with pytest.raises(DatasetError, match="does not tell its format"):
        Dataset.from_files(str(tmp_path / "odd"))
    with pytest.raises(DataFileNotFoundError, match="is not there"):
        Dataset.from_files(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"no format 'jsonlines'.*Did you mean"):
        Dataset.from_files(str(tmp_path), "jsonlines")
    with pytest.raises(UsageError, match=r"not at 'gs://bucket/x'"):
        Dataset.from_files("gs://bucket/x")


def test_files_of_a_bucket(bucket: str, tmp_path: Path) -> None:
    write(tmp_path / "data", "jsonl.gz")
    with open_storage(f"s3://{bucket}")[0] as backend:
        for file in (tmp_path / "data").iterdir():
            backend.write(f"train/{file.name}", file.read_bytes())
    assert list(Dataset.from_files(f"s3://{bucket}/train")) == samples(0, TOTAL)


def test_the_region_of_the_settings_is_that_of_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIFIED_STORAGE_REGION", "eu-central-7")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    with DataFiles() as files:
        backend, key = files._bucket("s3://anything/a/b.jsonl")
        assert (repr(backend), key) == ("S3Backend('anything', 'eu-central-7', prefix='')", "a/b.jsonl")
