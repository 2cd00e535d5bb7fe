"""Snapshots on storage: written by processes of their own, whole or not at all, the last two of each rank."""

import errno
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.io.snapshot.conftest import Nodes
from tests.support.snapshots import SnapshotRank, a_state
from unified.errors import SnapshotError
from unified.protocol.snapshots import SnapshotSeries, SnapshotStamp, StorageTarget, StoredSnapshot
from unified.snapshot.core.inventory import SnapshotBuffer
from unified.snapshot.memory import make_buffer
from unified.snapshot.server.writers import StorageWriters, WriteOrder
from unified.snapshot.storage import SnapshotStorage, name_of, target_of
from unified.snapshot.worker.image import StateImage, read_state
from unified.testing import Belongings, eventually, left_behind

SERIES = SnapshotSeries("job-1", "trainer", 2, 0)
WITHIN_S = 100.0


def buffer_of(state: Any) -> tuple[int, int]:
    image = StateImage(state)
    memory = bytearray(image.length)
    image.write(memory)
    descriptor = make_buffer(image.length)
    os.pwrite(descriptor, memory, 0)
    return descriptor, image.length


def write_order(descriptor: int, length: int, target: StorageTarget) -> WriteOrder:
    buffer = SnapshotBuffer(1, SnapshotSeries("job-1", "trainer", 1, 0), length, is_copy=False, length=length)
    return WriteOrder(buffer, descriptor, target, "name")


def stored(step: int, job_id: str = "job-1") -> StoredSnapshot:
    return StoredSnapshot(job_id=job_id, stamp=SnapshotStamp(1, step))


def write(storage: SnapshotStorage, step: int, job_id: str = "job-1") -> None:
    descriptor, length = buffer_of(a_state(float(step)))
    storage.write(descriptor, length, name_of(job_id, SnapshotStamp(1, step)))
    os.close(descriptor)


def weights(storage: SnapshotStorage, step: int) -> torch.Tensor:
    state = read_state(storage.read(stored(step)))
    assert isinstance(state["weights"], torch.Tensor)
    return state["weights"]


@pytest.fixture
def target(tmp_path: Path) -> StorageTarget:
    return target_of(str(tmp_path / "kept"), SERIES, {"AWS_REGION": "here", "HOME": "/"}, is_replicated=False)


def test_a_snapshot_comes_back_and_the_last_two_are_kept(target: StorageTarget) -> None:
    assert target.env == {"AWS_REGION": "here"}
    with SnapshotStorage(target.location, target.folder) as storage:
        assert storage.steps() == []
        write(storage, 9, "job.of-before")
        for step in (3, 4):
            write(storage, step)
        assert storage.steps() == [stored(3), stored(4)]
        assert torch.equal(weights(storage, 4), torch.full((1000,), 4.0))


def test_a_damaged_one_is_noticed_and_one_that_is_gone_is_named(target: StorageTarget) -> None:
    with SnapshotStorage(target.location, target.folder) as storage:
        write(storage, 3)
        path = next(Path(target.location).rglob("*.snapshot"))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(SnapshotError, match="is damaged"):
            storage.read(stored(3))
        path.write_bytes(data[:100])
        with pytest.raises(SnapshotError, match="is damaged"):
            storage.read(stored(3))
        with pytest.raises(SnapshotError, match=r"000000000004\.1\.job-1\.snapshot in .* cannot be read"):
            storage.read(stored(4))


def test_ranks_have_folders_of_their_own_unless_all_have_the_same(tmp_path: Path) -> None:
    ranks = (SERIES._replace(rank=rank) for rank in range(2))
    targets = [target_of("s3://bucket/run", series, {}, is_replicated=False) for series in ranks]
    assert {each.folder for each in targets} == {"snapshots/trainer/0-of-2", "snapshots/trainer/1-of-2"}
    assert target_of("kept", SERIES, {}, is_replicated=True).folder == "snapshots/trainer/replicated"
    assert target_of("kept", SERIES, {}, is_replicated=True).location == str(Path("kept").absolute())


def test_a_server_writes_on_demand_and_what_is_left_when_its_agent_stops(
    snapshot_node: Nodes, target: StorageTarget
) -> None:
    node = snapshot_node()
    rank = SnapshotRank(node, storage=target)
    assert node.heard() == [True]
    with SnapshotStorage(target.location, target.folder) as storage:
        rank.take(a_state(3.0), 3, to_storage=True)
        eventually(lambda: storage.steps() == [stored(3)], timeout=WITHIN_S, message="it was not written")
        for step in (4, 5):
            rank.take(a_state(float(step)), step)
        assert storage.steps() == [stored(3)]
        rank.client.close()
        node.persist()
        eventually(lambda: node.heard() == [False], timeout=WITHIN_S, message="the agent was not told")
        assert storage.steps() == [stored(4), stored(5)]
        assert torch.equal(weights(storage, 5), torch.full((1000,), 5.0))


def test_a_writer_that_nobody_could_wait_for_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pidfd(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", no_pidfd)
    descriptor, length = buffer_of({"step": 1})
    before, children = Belongings(), psutil.Process().children()
    ended: list[tuple[WriteOrder, str]] = []
    writers = StorageWriters(lambda *end: ended.append(end))
    order = write_order(descriptor, length, StorageTarget(location="/nowhere", folder="a"))
    writers.write(order)
    assert ended == [(order, "a process to write it cannot be started: Too many open files")]
    assert writers.is_idle
    assert set(psutil.Process().children()) <= set(children), "not even a zombie"
    assert left_behind(before) == []
    os.close(descriptor)


def test_a_large_image_has_more_time_to_be_written(target: StorageTarget) -> None:
    descriptor, _ = buffer_of({"step": 1})
    within: list[float] = []
    for length in (1 << 20, 40 << 30):
        writers = StorageWriters(lambda order, error: None)
        writers.write(write_order(descriptor, length, target))
        assert writers.next_deadline is not None
        within.append(writers.next_deadline - time.monotonic())
        writers.close()
    assert within == [pytest.approx(300, abs=20), pytest.approx(2348, abs=20)]
    os.close(descriptor)


def test_storage_that_does_not_take_it_is_complained_about(snapshot_node: Nodes, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    target = StorageTarget(location=str(tmp_path / "file"), folder="snapshots")
    rank = SnapshotRank(snapshot_node(), storage=target)
    rank.take(a_state(1.0), 1, to_storage=True)
    rank.take(a_state(2.0), 2, to_storage=True)
    assert rank.steps() == [(0, 1), (0, 2)]
    assert "the snapshot was not written to storage: " in rank.complaint
    rank.client.close()
