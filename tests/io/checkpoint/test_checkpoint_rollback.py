"""Runs that go back to an older checkpoint, and runs that meet another one in the same place."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.io.checkpoint.test_checkpoint_manager import names, payload_of, save_now
from tests.io.checkpoint.test_checkpoint_notifier import Heard, latest
from tests.support.s3 import S3Server, faulty
from unified.checkpoint import CheckpointManager
from unified.errors import (
    AlreadyExistsError,
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointSaveError,
)
from unified.storage import LocalBackend, S3Backend, StorageBackend
from unified.storage.backend import Stat


def first_incarnation(place: Path) -> None:
    with CheckpointManager(place) as manager:
        for step in (300, 400, 500, 600):
            manager.save_bytes(b"first %d" % step, step)


def test_after_a_discard_what_is_saved_is_the_latest(tmp_path: Path) -> None:
    first_incarnation(tmp_path)
    with CheckpointManager(tmp_path) as second:
        assert second.load_bytes(300) == b"first 300"
        assert second.discard_after(300) == [400, 500, 600]
        assert second.discard_after(300) == []
        assert second.load_bytes() == b"first 300"
        second.save_bytes(b"second 310", 310)
    assert len(names(tmp_path)) == 4, "the discarded ones' parts stay"
    with CheckpointManager(tmp_path) as third:
        assert third.load_bytes() == b"second 310"


def test_a_discard_needs_a_good_one_to_go_back_to(tmp_path: Path) -> None:
    first_incarnation(tmp_path)
    with CheckpointManager(tmp_path) as second:
        with pytest.raises(CheckpointNotFoundError, match="step 310"):
            second.discard_after(310)
        payload_of(tmp_path, 300).unlink()
        with pytest.raises(CheckpointCorruptError, match="step 300"):
            second.discard_after(300)
        assert second.steps() == [300, 400, 500, 600]


def test_without_it_what_this_run_saves_stays(tmp_path: Path) -> None:
    first_incarnation(tmp_path)
    with CheckpointManager(tmp_path, keep_last_n=2) as second:
        for step in (310, 320, 330):
            save_now(second, b"second", step)
        assert second.steps() == [320, 330, 500, 600]
        for step in (700, 800):
            save_now(second, b"second", step)
        assert second.steps() == [700, 800]


def test_nobody_is_warned_of_peers_or_of_ones_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ranks = [CheckpointManager(tmp_path, rank=rank, world_size=2) for rank in range(2)]
    for manager, steps in zip(ranks, ((2, 3), (1, 3)), strict=True):
        for step in steps:
            save_now(manager, b"same", step)
    ranks[0].save_bytes(b"same", 1)
    for manager in ranks:
        manager.close()
    assert "WARNING" not in caplog.text


def test_the_coordinator_goes_back_too(tmp_path: Path) -> None:
    first_incarnation(tmp_path)
    with Heard() as heard, CheckpointManager(tmp_path, coordinator_url=heard) as second:
        second.save_bytes(b"first 700", 700)
        second.discard_after(300)
        second.save_bytes(b"second 310", 310)
        second.close()
        assert latest(heard).step == 310


def test_an_earlier_incarnation_whose_clock_was_ahead_is_replaced_all_the_same(tmp_path: Path) -> None:
    first_incarnation(tmp_path)
    path = tmp_path / "step-000400.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "saved_at": 9e9}))
    with CheckpointManager(tmp_path) as second:
        save_now(second, b"second 400", 400)
        assert second.load_bytes(400) == b"second 400"


def test_a_run_that_was_started_twice_is_noticed(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as first:
        save_now(first, b"first 10", 10)
        with CheckpointManager(tmp_path) as second:
            save_now(first, b"first 20", 20)
            save_now(second, b"second 10", 10)  # not to be told from a run that starts again
            second.save_bytes(b"second 20", 20)
            with pytest.raises(CheckpointSaveError, match="step 20") as caught:
                second.wait()
            assert isinstance(caught.value.__cause__, CheckpointExistsError)
        assert first.load_bytes(20) == b"first 20"


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StorageBackend]:
    if request.param == "local":
        yield LocalBackend(tmp_path / "store", fsync=False)
        return
    server: S3Server = request.getfixturevalue("s3_environment")
    with faulty(server, lambda asked: None) as url, S3Backend(server.make_bucket(), endpoint_url=url) as bucket:
        yield bucket


def test_of_several_that_replace_one_version_one_succeeds(storage: StorageBackend) -> None:
    etag = storage.write("a", b"old").etag
    start = threading.Barrier(4)

    def replace(number: int) -> Stat | AlreadyExistsError:
        start.wait(100)
        try:
            return storage.replace("a", b"%d" % number, etag)
        except AlreadyExistsError as error:
            return error

    with ThreadPoolExecutor(4) as threads:
        ends = list(threads.map(replace, range(4)))
    assert sum(isinstance(end, AlreadyExistsError) for end in ends) == 3
    (written,) = [end for end in ends if not isinstance(end, AlreadyExistsError)]
    assert storage.stat("a").etag == written.etag
    storage.delete("a")
    with pytest.raises(AlreadyExistsError):
        storage.replace("a", b"new", etag)
