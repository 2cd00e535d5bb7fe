"""Datasets in a bucket of a real S3 server."""

from pathlib import Path

import pytest

from tests.support.data_files import WRITERS, assign_files, plain, samples
from unified.data import ShardReader, find_runs
from unified.data.files import DataFiles
from unified.errors import DataFileNotFoundError, DatasetError, StorageError, UsageError
from unified.storage import open_storage

SIZES = [30, 1, 9]


def upload(bucket: str, directory: Path) -> None:
    backend, _ = open_storage(f"s3://{bucket}")
    with backend:
        for file in directory.rglob("*"):
            if file.is_file():
                backend.write(file.relative_to(directory).as_posix(), file.read_bytes())


@pytest.mark.parametrize("kind", WRITERS)
def test_shards_of_a_prefix_are_all_of_its_samples_once(kind: str, bucket: str, tmp_path: Path) -> None:
    format_, suffix, write = WRITERS[kind]
    (tmp_path / "train" / "sub").mkdir(parents=True)
    names = [f"part-9{suffix}", f"part-10{suffix}", f"sub/part-1{suffix}"]
    for name, size, start in zip(names, SIZES, [0, 30, 31], strict=True):
        write(tmp_path / "train" / name, samples(start, start + size))
    (tmp_path / "train" / "_SUCCESS").write_text("")
    upload(bucket, tmp_path)

    for path in (f"s3://{bucket}/train", f"s3://{bucket}/train/", f"s3://{bucket}/tr*/**/part-*"):
        runs = find_runs(path, format_)
        assert [(run.path, run.num_samples) for run in runs] == [
            (f"s3://{bucket}/train/{name}", size) for name, size in zip(names, SIZES, strict=True)
        ]
    with ShardReader() as reader:
        read = [
            [plain(format_, row)["number"] for row in reader.iter_samples(assign_files(runs, 0, start, end))]
            for start, end in [(0, 25), (25, 40)]
        ]
    assert read == [list(range(25)), list(range(25, 40))]


def test_a_whole_bucket_and_a_single_object(bucket: str, tmp_path: Path) -> None:
    WRITERS["jsonl"][2](tmp_path / "odd name", samples(0, 3))
    WRITERS["jsonl"][2](tmp_path / "b.jsonl", samples(3, 5))
    upload(bucket, tmp_path)

    assert [run.num_samples for run in find_runs(f"s3://{bucket}/odd name", "jsonl")] == [3]
    with DataFiles() as files:
        assert files.find(f"s3://{bucket}", "jsonl") == [f"s3://{bucket}/b.jsonl"]
        assert files.find(f"s3://{bucket}/*", "jsonl") == [f"s3://{bucket}/b.jsonl", f"s3://{bucket}/odd name"]


def test_what_is_not_there_is_named(bucket: str, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.csv").write_text("")
    upload(bucket, tmp_path)
    with pytest.raises(DataFileNotFoundError, match=f"s3://{bucket}/nothing is not there"):
        find_runs(f"s3://{bucket}/nothing", "csv")
    with pytest.raises(DataFileNotFoundError, match=r"no file matches s3://.*/d/\*\.parquet"):
        find_runs(f"s3://{bucket}/d/*.parquet", "parquet")
    with pytest.raises(DataFileNotFoundError, match=r"/d holds no parquet files .*a\.csv"):
        find_runs(f"s3://{bucket}/d", "parquet")
    with pytest.raises(DatasetError, match=f"s3://{bucket}/d/a.csv is empty"):
        find_runs(f"s3://{bucket}/d", "csv")
    with pytest.raises(StorageError, match="no-such-bucket"):
        find_runs("s3://no-such-bucket/d", "csv")
    with pytest.raises(UsageError, match="names no bucket"):
        find_runs("s3:///d", "csv")


def test_an_object_that_went_away_is_named(bucket: str, tmp_path: Path) -> None:
    WRITERS["jsonl"][2](tmp_path / "b.jsonl", samples(0, 5))
    upload(bucket, tmp_path)
    shard = assign_files(find_runs(f"s3://{bucket}", "jsonl"), 0, 0, 5)
    backend, _ = open_storage(f"s3://{bucket}")
    with backend:
        backend.delete("b.jsonl")
    with ShardReader() as reader, pytest.raises(FileNotFoundError, match=f"s3://{bucket}/b.jsonl is not there"):
        list(reader.iter_samples(shard))
