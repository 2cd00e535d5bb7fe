"""Checkpoints that are told to a coordinator, in this process and in the master's, and troubles with them."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.io.checkpoint.test_checkpoint_manager import AT_ONCE, Gated, checksum_of, flip, payload_of, save_now
from tests.support.master_process import StartMaster
from unified.checkpoint import CheckpointFallbackWarning, CheckpointManager
from unified.coordinator.client import Coordinator, RemoteCoordinator
from unified.data import EmbeddedCoordinator
from unified.errors import CheckpointSaveError, MasterUnreachableError, UsageError
from unified.protocol.coordinator import (
    CoordinatorRequest,
    GetLatestCheckpoint,
    NotifyCheckpoint,
    RecoveryInfo,
    TellEvent,
)

A = TypeVar("A")


class Heard(EmbeddedCoordinator):
    """Remembers what it was asked; while `is_away`, nobody is there."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[CoordinatorRequest] = []
        self.is_away = False
        self.may_answer = threading.Event()
        self.may_answer.set()

    def submit(self, request: CoordinatorRequest, expected: type[A], *, timeout_s: float | None = None) -> Future[A]:
        assert self.may_answer.wait(100)
        if self.is_away:
            raise MasterUnreachableError("nobody is there")
        self.asked.append(request)
        return super().submit(request, expected, timeout_s=timeout_s)

    @property
    def steps(self) -> list[int]:
        return [each.step for each in self.asked if isinstance(each, NotifyCheckpoint)]

    @property
    def events(self) -> list[TellEvent]:
        return [each for each in self.asked if isinstance(each, TellEvent)]


@pytest.fixture
def heard() -> Iterator[Heard]:
    with Heard() as found:
        yield found
        found.may_answer.set()


def latest(coordinator: Coordinator, name: str = "default") -> RecoveryInfo:
    return coordinator.ask(GetLatestCheckpoint(name=name), RecoveryInfo)


def test_a_checkpoint_that_was_written_is_known(heard: Heard, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, coordinator_url=heard, rank=1, world_size=2, series="actor") as manager:
        manager.save_bytes(b"abc", 3)
    found = latest(heard, "actor")
    assert (found.step, found.size_bytes, found.checksum) == (3, 3, checksum_of(b"abc"))
    assert (found.world_size, found.worker_id) == (2, "worker-1")
    assert Path(found.path).read_bytes().startswith(b"{")
    assert not latest(heard).is_found


def test_of_ranks_that_save_the_same_the_one_that_wrote_it_tells(heard: Heard, tmp_path: Path) -> None:
    ranks = [CheckpointManager(tmp_path, coordinator_url=heard, rank=rank, world_size=3) for rank in range(3)]
    for manager in ranks:
        manager.save_checkpoint(4, {"loss": 0.5})
        manager.close()
    assert heard.steps == [4]


def test_no_save_waits_for_the_coordinator_or_fails_with_it(
    heard: Heard, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path, coordinator_url=heard) as manager:
        heard.may_answer.clear()
        for step in (1, 2, 3):
            manager.save_bytes(b"x", step)
        manager.wait()
        assert manager.steps() == [1, 2, 3]
        assert heard.steps == []
        heard.is_away = True
        heard.may_answer.set()
        for step in (4, 5):
            save_now(manager, b"x", step)
            manager._notifier.close(10)
        assert caplog.text.count("event=checkpoint-notification-failed") == 1
        heard.is_away = False
    assert heard.steps == [5], "the end of the manager tells what was lost"


def test_a_lost_notice_is_repeated_with_the_next(heard: Heard, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, coordinator_url=heard) as manager:
        heard.is_away = True
        save_now(manager, b"x", 9)
        manager._notifier.close(10)
        heard.is_away = False
        save_now(manager, b"x", 2)
        manager._notifier.close(10)
        assert latest(heard).step == 9


def test_a_save_that_failed_is_an_event(heard: Heard, tmp_path: Path) -> None:
    store = Gated(tmp_path)
    manager = CheckpointManager("", store, backoff=AT_ONCE, max_tries=2, coordinator_url=heard, rank=0)
    store.errors = [OSError("full"), OSError("full")]
    manager.save_bytes(b"x", 7)
    with pytest.raises(CheckpointSaveError):
        manager.close()
    (event,) = heard.events
    assert (event.event, event.worker_id) == ("checkpoint-failed", "worker-0")
    assert "step 7" in event.reason
    assert "tries: 2" in event.reason
    assert "OSError: full" in event.reason
    assert heard.steps == []


@pytest.mark.parametrize("how", ["load", "latest_checkpoint"])
def test_a_fallback_is_an_event(heard: Heard, tmp_path: Path, how: str) -> None:
    with CheckpointManager(tmp_path, coordinator_url=heard) as manager:
        for step in (1, 2):
            manager.save_bytes(b"x" * 100, step)
        manager.wait()
        damaged = payload_of(tmp_path, 2)
        if how == "load":
            flip(damaged)
        else:
            damaged.unlink()
        with pytest.warns(CheckpointFallbackWarning):
            found: Any = manager.load_bytes() if how == "load" else manager.latest_checkpoint()
        assert found
    (event,) = heard.events
    assert event.event == "checkpoint-damaged"
    assert "step 2 is damaged" in event.reason
    assert str(tmp_path) in event.reason


def test_without_a_coordinator_nobody_is_told_and_a_wrong_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COORDINATOR_URL", raising=False)
    with CheckpointManager(tmp_path) as manager:
        save_now(manager, b"x", 1)
        assert manager._notifier._thread is None
    monkeypatch.setenv("COORDINATOR_URL", "ftp://there")
    with pytest.raises(UsageError, match="ftp://there"):
        CheckpointManager(tmp_path)


def test_a_master_that_was_started_again_knows_it_and_keeps_its_log(
    start_master: StartMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = start_master()
    address = master.address
    monkeypatch.setenv("COORDINATOR_URL", address.replace("tcp", "http"))
    with CheckpointManager(tmp_path / "saved") as manager:
        manager.save_bytes(b"x", 6)
        manager._notifier.event("checkpoint-failed", "one that failed")
    master.kill()
    again = start_master(bind=address)
    with RemoteCoordinator(address) as remote:
        assert latest(remote).path == str(tmp_path / "saved" / "step-000006.json")
    assert "event=checkpoint-failed worker=worker-0 reason='one that failed'" in again.log.read_text()
