"""Bad data, given to the classes that users meet: the error says what, where and what to do, and nothing is lost."""

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.data_files import WRITERS, samples, write_jsonl
from tests.support.s3 import S3Server, faulty
from unified.data import DatasetRegistry, EmbeddedCoordinator, ShardedDataset, TrainingOrchestrator
from unified.errors import (
    CoordinatorError,
    DataFileNotFoundError,
    DatasetError,
    OptionError,
    StorageDeniedError,
    UnifiedError,
    UsageError,
)

Register = Callable[[str, str], None]
FORMATS = ["parquet", "csv", "tfrecord", "jsonl", "arrow"]


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[DatasetRegistry]:
    """One that knows a good dataset, of which nothing may be lost by what a test does to it."""
    before = set(threading.enumerate())
    write_jsonl(tmp_path / "good.jsonl", samples(0, 20))
    with EmbeddedCoordinator() as coordinator, DatasetRegistry(coordinator, rank=0, world_size=1) as made:
        made.register("good", tmp_path / "good.jsonl", "jsonl", shard_size=6, metadata={"version": 1})
        known = made.datasets()
        yield made
        assert made.datasets() == known, "a refusal changed something"
        assert [row["number"] for row in ShardedDataset(made, "good")] == list(range(20))
    assert set(threading.enumerate()) <= before


def refused(kind: type[UnifiedError], ask: Callable[[], object], *words: str) -> None:
    """It raises this very class, and its message has these words."""
    with pytest.raises(kind) as caught:
        ask()
    assert type(caught.value) is kind
    told = str(caught.value)
    assert not [word for word in words if word not in told], told


# Files


@pytest.fixture(params=[None, 5], ids=["counted", "told"])
def register(registry: DatasetRegistry, tmp_path: Path, request: pytest.FixtureRequest) -> Register:
    """Registers a file of this format; also where the user says how many samples it has, and nothing is counted."""
    return lambda name, format_: registry.register("bad", tmp_path / name, format_, total_samples=request.param)


@pytest.mark.parametrize("name", ["nowhere", "nowhere/*.csv"])
def test_path_that_is_missing(register: Register, name: str) -> None:
    refused(DataFileNotFoundError, lambda: register(name, "csv"), name, "check the pa", "this host sees")


def test_folder_without_files_of_the_format(register: Register, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    refused(DataFileNotFoundError, lambda: register("folder", "csv"), "holds no csv files", "it is empty")
    (tmp_path / "folder/a.parquet").touch()
    refused(DataFileNotFoundError, lambda: register("folder", "csv"), "a.parquet", "Give the right format, or a")


@pytest.mark.parametrize("format_", FORMATS)
def test_file_that_is_empty(register: Register, format_: str, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    refused(DatasetError, lambda: register("empty", format_), "/empty is empty: write it again")


@pytest.mark.parametrize("format_", ["parquet", "csv", "arrow"])
def test_file_without_samples(register: Register, format_: str, tmp_path: Path) -> None:
    write = WRITERS[format_][2]
    write(tmp_path / "none", [])
    refused(DatasetError, lambda: register("none", format_), "/none", "no sample", "write")


@pytest.mark.parametrize("format_", FORMATS)
def test_file_that_is_cut_short(register: Register, format_: str, tmp_path: Path) -> None:
    if format_ in ("csv", "jsonl"):  # whose rows are whole up to the cut, which is in the first one here
        (tmp_path / "cut").write_bytes(b'"a\n' if format_ == "csv" else b'{"number": 1, "te')
    else:
        WRITERS[format_][2](tmp_path / "whole", samples(0, 9))
        (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:30])
    refused(DatasetError, lambda: register("cut", format_), "/cut")


@pytest.mark.parametrize(("real", "format_"), [*itertools.permutations(FORMATS, 2)])
def test_file_of_another_format(register: Register, real: str, format_: str, tmp_path: Path) -> None:
    WRITERS[real][2](tmp_path / "data", samples(0, 9))
    refused(DatasetError, lambda: register("data", format_), "/data", "format")


@pytest.mark.parametrize("told", [5, 21, 0, -1])
@pytest.mark.parametrize("kind", WRITERS)
def test_one_file_that_does_not_hold_what_was_said(
    registry: DatasetRegistry, kind: str, told: int, tmp_path: Path
) -> None:
    """Where the file itself says what it holds; and everywhere that it holds nothing."""
    format_, suffix, write = WRITERS[kind]
    path = tmp_path / f"data{suffix}"
    write(path, samples(0, 20))
    if told <= 0 or format_ in ("parquet", "arrow", "orc"):
        words = (path.name, f"hold 20 samples, not total_samples={told}", "give the right number, or none")
        refused(UsageError, lambda: registry.register("bad", path, format_, total_samples=told), *words)
        return
    with EmbeddedCoordinator() as coordinator, DatasetRegistry(coordinator, rank=0) as other:
        other.register("big", path, format_, total_samples=told, shard_size=10)
        if told < 20:
            assert len(list(ShardedDataset(other, "big"))) == told
        else:
            refused(DatasetError, lambda: list(ShardedDataset(other, "big")), path.name, "end 1 samples before shard 2")


def test_file_that_cannot_be_read(register: Register) -> None:
    path = "/proc/self/mem"  # opens, but reading fails, also for root
    refused(DatasetError, lambda: register(path, "jsonl"), path, "Input/output error")


def test_format_that_there_is_none(register: Register) -> None:
    refused(UsageError, lambda: register("good.jsonl", "json"), "'json'", "Did you mean 'jsonl'?")


def test_file_that_went_away_or_was_changed_since(registry: DatasetRegistry, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "later.jsonl", samples(0, 9))
    with EmbeddedCoordinator() as coordinator, DatasetRegistry(coordinator, rank=0) as other:
        other.register("later", tmp_path / "later.jsonl", "jsonl")
        write_jsonl(tmp_path / "later.jsonl", samples(0, 4))
        refused(DatasetError, lambda: list(ShardedDataset(other, "later")), "later.jsonl", "they were changed")
        (tmp_path / "later.jsonl").unlink()
        refused(DataFileNotFoundError, lambda: list(ShardedDataset(other, "later")), "later.jsonl", "deleted")
        write_jsonl(tmp_path / "later.jsonl", samples(0, 9))
        assert len(list(ShardedDataset(other, "later"))) == 9, "nothing counts as read that was not"


# In S3


def test_bucket_that_is_missing_or_denies(
    registry: DatasetRegistry, s3_environment: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, words in (("s3://no-such-bucket/x", "make it, or check"), (f"s3://{bucket}/no", "Check the bucket")):
        with pytest.raises(FileNotFoundError, match=words) as caught:
            registry.register("bad", path, "csv")
        assert path.removesuffix("/x") in str(caught.value)
    with faulty(s3_environment, lambda _: "deny") as url, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", url)
        refused(
            StorageDeniedError, lambda: registry.register("bad", f"s3://{bucket}/data", "csv"), bucket, "credentials"
        )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    refused(StorageDeniedError, lambda: registry.register("bad", f"s3://{bucket}/data", "csv"), bucket, "credentials")


# Datasets, epochs and ranks


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"shard_size": 5}, "shard_size is 6, not 5"),
        ({"shuffle": True}, "shuffle is False, not True"),
        ({"seed": 3}, "seed is 0, not 3"),
        ({"total_samples": 7}, "total_samples is 20, not 7"),
        ({"path": "other.jsonl"}, "other.jsonl"),
        ({"metadata": {"version": 2}}, "metadata is {'version': '1'}, not {'version': '2'}"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_dataset_of_one_name_with_other_values(
    registry: DatasetRegistry, tmp_path: Path, values: dict[str, object], told: str
) -> None:
    write_jsonl(tmp_path / "other.jsonl", samples(0, 20))
    given: dict[str, object] = {"path": "good.jsonl", "format": "jsonl", "shard_size": 6, **values}
    path = tmp_path / str(given.pop("path"))
    refused(
        CoordinatorError,
        lambda: registry.register("good", path, **given),  # type: ignore[arg-type]
        "dataset 'good' is registered already, with other values",
        told,
        "Register it as it was, or under another name",
    )


@pytest.mark.parametrize(
    "ask",
    [
        lambda registry: registry.get_shard("goof", 0, 0),
        lambda registry: registry.get_assignment("goof", 0),
        lambda registry: registry.mark_done("goof", [0], 0, 0),
        lambda registry: registry.register_worker("goof", 0),
        lambda registry: registry.advance_epoch("goof"),
        lambda registry: registry.current_epoch("goof"),
        lambda registry: registry.active_workers("goof"),
        lambda registry: ShardedDataset(registry, "goof"),
    ],
)
def test_dataset_that_there_is_none(registry: DatasetRegistry, ask: Callable[[DatasetRegistry], object]) -> None:
    refused(
        CoordinatorError, lambda: ask(registry), "no dataset 'goof' is registered", "register it first", "mean 'good'?"
    )


def test_epochs_that_there_are_none(registry: DatasetRegistry, tmp_path: Path) -> None:
    refused(CoordinatorError, lambda: registry.get_shard("good", 0, -1), "'good' has no epoch -1", "counted from 0")
    refused(CoordinatorError, lambda: registry.advance_epoch("good", -1), "'good' has no epoch -1", "counted from 0")
    refused(CoordinatorError, lambda: registry.mark_done("good", [0], -1, 0), "'good' has no epoch -1", "from 0")
    with EmbeddedCoordinator() as coordinator, DatasetRegistry(coordinator, rank=0) as other:
        other.register("good", tmp_path / "good.jsonl", "jsonl", shard_size=6)
        other.advance_epoch("good", 2)
        refused(
            CoordinatorError, lambda: other.get_shard("good", 0, 1), "epoch 1 of dataset 'good' is past", "current", "2"
        )
        assert len(other.get_assignment("good", 0, 2)) == 4


@pytest.mark.parametrize(("rank", "told"), [(1, "its ranks are 0 to 0"), (-1, "ranks count from 0")])
def test_ranks_that_are_not_in_the_world(registry: DatasetRegistry, rank: int, told: str) -> None:
    words = (f"rank {rank}", told)
    refused(UsageError, lambda: registry.get_shard("good", rank, 0), *words)
    refused(UsageError, lambda: DatasetRegistry("local", rank=rank, world_size=1), *words)
    refused(UsageError, lambda: TrainingOrchestrator("w", "local", 1, rank), *words)


def test_ranks_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "4")
    monkeypatch.setenv("WORLD_SIZE", "4")
    refused(OptionError, DatasetRegistry, "rank 4 is not in a world of 4")
    refused(OptionError, lambda: TrainingOrchestrator("w", "local"), "rank 4 is not in a world of 4")
