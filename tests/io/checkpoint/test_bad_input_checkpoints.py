"""Places that take no checkpoint, and checkpoints that are damaged: errors say what to do, and those before load."""

import asyncio
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.io.checkpoint.test_checkpoint_manager import names, save_now
from tests.support.s3 import S3Server
from unified.checkpoint import CheckpointFallbackWarning, CheckpointManager
from unified.core.backoff import Backoff
from unified.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    NotFoundError,
    StorageDeniedError,
    StorageError,
    StorageUnavailableError,
    UsageError,
)
from unified.storage import LocalBackend, S3Backend

PLAIN = {"Content-Type": "text/plain"}
GOOD = b"good" * 1000


@pytest.fixture
def good(tmp_path: Path) -> Iterator[Path]:
    """A place with a checkpoint, which is there and loads whatever a test does."""
    place = tmp_path / "checkpoints"
    with CheckpointManager(place) as manager:
        manager.save_bytes(GOOD, 1)
    yield place
    with CheckpointManager(place) as reader:
        assert reader.load_bytes(1, exact=True) == GOOD


def save_error(manager: CheckpointManager, step: int = 2, data: bytes = b"new") -> CheckpointSaveError:
    """That a save ends in, whose message says which and where."""
    manager.save_bytes(data, step)
    with pytest.raises(
        CheckpointSaveError, match=f"not saved in .*step {step} .*Earlier checkpoints are unchanged"
    ) as caught:
        manager.close()
    assert caught.value.steps == (step,)
    assert manager.store.place in str(caught.value)
    return caught.value


# Places


@pytest.mark.parametrize("place", ["s3://b/runs//r1", "s3://b/runs/../r1"])
def test_a_place_that_is_no_key_of_a_bucket_is_refused_when_the_manager_is_made(place: str) -> None:
    with pytest.raises(UsageError, match="is no key of a store"):
        CheckpointManager(place)


def test_a_prefix_that_is_no_key_of_a_given_store_is_refused_when_the_manager_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'runs//r1' is no key of a store"):
        CheckpointManager("runs//r1", backend=LocalBackend(tmp_path))


def test_place_that_is_missing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "nowhere") as manager:
        assert manager.steps() == []
        for step in (None, 0, "latest"):
            with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint to load in .*nowhere"):
                manager.load_bytes(step)
        with pytest.raises(
            CheckpointNotFoundError, match=r"no checkpoint of step 7 in .*nowhere: there is none at all"
        ):
            manager.load_bytes(7)
    assert not (tmp_path / "nowhere").exists(), "to look for it makes nothing"


def test_place_that_is_no_directory(good: Path) -> None:
    file = good.parent / "file"
    file.write_text("mine")
    with pytest.raises(UsageError, match=r"kept in a directory, and '.*/file' is none"):
        CheckpointManager(file)
    with pytest.raises(UsageError, match=r"kept in a directory, and '.*/file' is none"):
        CheckpointManager(file / "below" / "it")
    cause = save_error(CheckpointManager("", LocalBackend(file / "below"), max_tries=1)).__cause__
    assert type(cause) is StorageError
    assert "is a file, not a folder" in str(cause)
    assert file.read_text() == "mine"


def test_place_where_nobody_may_write() -> None:
    with pytest.raises(UsageError, match=r"cannot be kept in /sys/a/b, .*: no folder can be made in /sys \("):
        CheckpointManager("/sys/a/b")
    cause = save_error(CheckpointManager("", LocalBackend("/sys/checkpoints"))).__cause__
    assert type(cause) is StorageDeniedError
    assert "check its owner and mode" in str(cause)
    cause = save_error(CheckpointManager("", LocalBackend("/proc/nope"))).__cause__
    assert type(cause) is NotFoundError
    assert str(cause).endswith("there is no folder /proc/nope, and it cannot be made")


SAVE_UNTIL_FULL = """
import os, subprocess, sys
from unified.checkpoint import CheckpointManager
from unified.core.backoff import Backoff
from unified.errors import CheckpointSaveError, StorageFullError

place = sys.argv[1]
if sys.argv[2] == "tmpfs":
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], check=True)
else:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
manager = CheckpointManager(place, max_tries=2, backoff=Backoff(first_s=0.0))
manager.save_bytes(b"a" * 1_000_000, 1)
manager.wait()
manager.save_bytes(b"b" * 8_000_000, 2)
try:
    manager.wait()
except CheckpointSaveError as error:
    assert type(error.__cause__) is StorageFullError, error.__cause__
    assert "step 2" in str(error) and place in str(error) and "Make room" in str(error), error
else:
    raise SystemExit("there was room")
names = sorted(os.listdir(place))
assert len(names) == 2 and all(name.startswith("step-000001") for name in names), names
assert manager.load_bytes() == b"a" * 1_000_000
manager.save_bytes(b"c" * 1_000_000, 3)
manager.close()
assert manager.steps() == [1, 3]
"""


def can_mount() -> bool:
    """A file system of one's own, which no other process sees."""
    return os.geteuid() == 0 and not subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode


def test_disk_that_is_full(tmp_path: Path) -> None:
    """A real one where that may be made, else a limit of the system on the size of a file. It goes on with less."""
    how = ["unshare", "-m"] if can_mount() else []
    program = [sys.executable, "-c", SAVE_UNTIL_FULL, str(tmp_path), "tmpfs" if how else "limit"]
    done = subprocess.run([*how, *program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


# Places in S3


@pytest.fixture
def bucket(s3_environment: S3Server) -> Iterator[str]:
    """A bucket with a checkpoint, which is there and loads whatever a test does."""
    name = s3_environment.make_bucket()
    with CheckpointManager(f"s3://{name}") as manager:
        manager.save_bytes(GOOD, 1)
    yield name
    with CheckpointManager(f"s3://{name}") as reader:
        assert reader.load_bytes(1, exact=True) == GOOD


@pytest.fixture
def look_at_credentials(s3_environment: S3Server) -> Iterator[Callable[[bool], None]]:
    """Whether the store checks who asks, against the users that it has: none."""

    def set_to(is_checked: bool) -> None:
        body = b"0" if is_checked else b"inf"
        request = urllib.request.Request(f"{s3_environment.url}/moto-api/reset-auth", data=body, headers=PLAIN)
        with urllib.request.urlopen(request, timeout=100) as answer:
            assert answer.status == 200

    yield set_to
    set_to(False)


def test_s3_that_denies(bucket: str, look_at_credentials: Callable[[bool], None]) -> None:
    manager = CheckpointManager(f"s3://{bucket}")
    look_at_credentials(True)
    cause = save_error(manager).__cause__
    assert type(cause) is StorageDeniedError
    assert "HTTP 403" in str(cause)
    assert "check the credentials" in str(cause)
    with CheckpointManager(f"s3://{bucket}") as reader, pytest.raises(StorageDeniedError, match=f"list s3://{bucket}/"):
        reader.load_bytes()
    look_at_credentials(False)


def test_s3_without_credentials(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            patch.delenv(name)
        cause = save_error(CheckpointManager(f"s3://{bucket}")).__cause__
    assert type(cause) is StorageDeniedError
    assert "no usable credentials in the environment" in str(cause)


@pytest.mark.usefixtures("s3_environment")
def test_bucket_that_is_missing() -> None:
    cause = save_error(CheckpointManager("s3://no-such-bucket/run")).__cause__
    assert type(cause) is NotFoundError
    assert "there is no bucket 'no-such-bucket' at this endpoint; make it, or check the name" in str(cause)
    with CheckpointManager("s3://no-such-bucket/run") as reader, pytest.raises(NotFoundError, match="check the name"):
        reader.load_bytes()


def test_s3_that_does_not_answer(bucket: str) -> None:
    store = S3Backend(bucket, endpoint_url="http://127.0.0.1:9", max_attempts=1)
    cause = save_error(CheckpointManager("", store, max_tries=2, backoff=Backoff(first_s=0.0))).__cause__
    assert type(cause) is StorageUnavailableError
    assert "check the endpoint and the network" in str(cause)


# Checkpoints


@pytest.mark.parametrize("nbytes", [0, 5])
@pytest.mark.parametrize("what", ["step-000002.*.bin", "step-000002.json"])
def test_checkpoint_that_is_truncated(good: Path, what: str, nbytes: int) -> None:
    with CheckpointManager(good) as manager:
        save_now(manager, b"x" * 5000, 2)
        (file,) = good.glob(what)
        os.truncate(file, nbytes)
        with pytest.warns(CheckpointFallbackWarning, match=f"step 2 is damaged: {file.name} .*step 1 instead"):
            assert manager.load_bytes() == GOOD
        with pytest.raises(CheckpointCorruptError, match=f"step 2 is damaged: {file.name} "):
            manager.load_bytes(2, exact=True)
        manager.save_bytes(b"again", 2)
        assert manager.load_bytes() == b"again"


def test_two_writers_of_one_step(good: Path) -> None:
    with CheckpointManager(good) as ours, CheckpointManager(good) as theirs:
        save_now(ours, b"ours", 2)
        cause = save_error(theirs).__cause__
        assert type(cause) is CheckpointExistsError
        assert "saved meanwhile by another writer" in str(cause)
        assert "Give each run a storage_path of its own; nothing of the other's was changed" in str(cause)
        assert ours.load_bytes() == b"ours"
    assert len(names(good)) == 4


async def test_payload_of_zero_bytes(good: Path) -> None:
    manager = CheckpointManager(good)
    for empty in (b"", bytearray(), memoryview(b"")):
        with pytest.raises(UsageError, match="have 0 bytes, so nothing was saved"):
            manager.save_bytes(empty, 2)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="have 0 bytes, so nothing was saved"):
            await manager.save_async(empty, 2)  # type: ignore[arg-type]
    assert await manager.list_checkpoints() == [1]
    await asyncio.to_thread(manager.close)


def test_rank_that_is_not_in_the_world(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = "rank 4 is not in a world of 4: its ranks are 0 to 3"
    with pytest.raises(UsageError, match=told):
        CheckpointManager(good, rank=4, world_size=4)
    monkeypatch.setenv("RANK", "4")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match=told):
        CheckpointManager(good)
