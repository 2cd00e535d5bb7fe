"""Checkpoints of a run: files first and the mark last, in a bucket and in a folder."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unified.errors import CheckpointCorruptError, CheckpointNotFoundError, StorageError, UsageError
from unified.storage import open_storage
from unified.training.checkpoints import RunCheckpointManager
from unified.training.layout import RunLayout


@pytest.fixture(params=["local", "s3"])
def layout(request: pytest.FixtureRequest, tmp_path: Path) -> RunLayout:
    base = f"file://{tmp_path}/runs" if request.param == "local" else f"s3://{request.getfixturevalue('bucket')}/runs"
    return RunLayout(base, "run-1", "meta")


def keys(layout: RunLayout) -> list[str]:
    backend, prefix = open_storage(layout.prefix)
    with backend:
        return [stat.key.removeprefix(prefix).lstrip("/") for stat in backend.list(prefix)]


def test_the_layout_byte_for_byte(layout: RunLayout, tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"12345")
    with RunCheckpointManager(layout, world_size=2) as manager:
        manager.prepare()
        manager.persist_config({"lr": 1.0})
        manager.save_checkpoint(1, {"loss": 2.5}, {"step-000001.pt": tmp_path / "model"}, state={"epoch": 0})
        manager.save_checkpoint(2, files={"checkpoint-2/model/a": b"1", "checkpoint-2/b": b""})
        assert manager.complete_steps() == [1, 2]
        assert manager.latest() == 2
        assert manager.read_config() == {"lr": 1.0}
        mark = manager.read_mark(1)
        assert (mark.step, mark.framework, mark.run_id, mark.world_size) == (1, "meta", "run-1", 2)
        assert (mark.metrics, mark.state, mark.nbytes()) == ({"loss": 2.5}, {"epoch": 0}, 5)
        fetched = manager.fetch(2, tmp_path / "fetched")
        assert {name: path.read_bytes() for name, path in fetched.items()} == {
            "checkpoint-2/model/a": b"1",
            "checkpoint-2/b": b"",
        }
    assert keys(layout) == [
        "checkpoints/checkpoint-2/b",
        "checkpoints/checkpoint-2/model/a",
        "checkpoints/step-000001.json",
        "checkpoints/step-000001.pt",
        "checkpoints/step-000002.json",
        "config/run.json",
        "logs/.keep",
    ]


def test_steps_that_are_not_complete_do_not_count(layout: RunLayout) -> None:
    backend, prefix = open_storage(layout.checkpoints_uri)
    prefix = f"{prefix}/" if prefix else ""
    with RunCheckpointManager(layout) as manager, backend:
        assert (manager.latest(), manager.complete_steps(), manager.read_config()) == (None, [], None)
        for step in range(1, 7):
            manager.save_checkpoint(step, files={f"step-{step:06}.pt": b"abc"})
        backend.write(f"{prefix}step-000002.json", b'{"step": 2, "fi')
        backend.write(f"{prefix}step-000003.json", b'{"step": 4}')
        backend.write(f"{prefix}step-000005.pt", b"ab")
        backend.delete(f"{prefix}step-000006.pt")
        backend.write(f"{prefix}step-000007.pt", b"no mark yet")
        assert manager.complete_steps() == [1, 4]
        assert manager.latest() == 4
        with pytest.raises(CheckpointNotFoundError, match=r"step-000002.json is no mark"):
            manager.read_mark(2)
        with pytest.raises(CheckpointNotFoundError, match=r"no step-000007.json"):
            manager.read_mark(7)


def damage(layout: RunLayout, name: str) -> None:
    """Write 0xff over the middle of a file."""
    backend, prefix = open_storage(layout.checkpoints_uri)
    with backend:
        data = bytearray(backend.read(key := f"{prefix}/{name}".lstrip("/")))
        middle = len(data) // 2
        data[middle : middle + 10] = b"\xff" * 10
        backend.write(key, bytes(data))


def test_the_newest_step_whose_bytes_are_as_they_were_is_fetched(
    layout: RunLayout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunCheckpointManager(layout) as manager:
        assert manager.fetch_latest(tmp_path / "none") is None
        for step in range(1, 5):
            manager.save_checkpoint(step, files={f"step-{step:06}.pt": b"abc" * 100, f"checkpoint-{step}/b": b""})
        assert manager.fetch_latest(tmp_path / "whole") == 4
        assert capsys.readouterr().err == ""
        damage(layout, "step-000004.pt")
        backend, prefix = open_storage(layout.checkpoints_uri)
        with backend:
            backend.write(f"{prefix}/step-000003.pt".lstrip("/"), b"abc" * 99)
        assert manager.latest() == 4, "sizes are as they were"
        with pytest.raises(CheckpointCorruptError, match=r"step-000004.pt has the checksum .*, .* was saved"):
            manager.fetch(4, tmp_path / "damaged")
        assert manager.fetch_latest(tmp_path / "fetched") == 2
        assert (tmp_path / "fetched/step-000002.pt").read_bytes() == b"abc" * 100
        first, second = capsys.readouterr().err.splitlines()
        assert re.match(r"unified-train: warning: checkpoint 4 in .* passed over: step-000004.pt has the chec", first)
        assert re.match(r"unified-train: warning: checkpoint 3 in .* passed over: step-000003.pt has 297 bytes", second)
        assert manager.fetch(2, tmp_path / "fetched").keys() == {"step-000002.pt", "checkpoint-2/b"}


def test_a_mark_of_an_older_version_has_no_checksums(layout: RunLayout, tmp_path: Path) -> None:
    backend, prefix = open_storage(layout.checkpoints_uri)
    with RunCheckpointManager(layout) as manager, backend:
        manager.save_checkpoint(1, files={"step-000001.pt": b"abc" * 100})
        mark = json.loads(backend.read(key := f"{prefix}/step-000001.json".lstrip("/")))
        assert mark["files"][0].pop("checksum").startswith(("xxh3_64:", "crc32:"))
        backend.write(key, json.dumps(mark).encode())
        damage(layout, "step-000001.pt")
        assert manager.fetch_latest(tmp_path / "fetched") == 1


def test_a_damaged_step_is_not_kept_in_the_place_of_a_whole_one(layout: RunLayout, tmp_path: Path) -> None:
    """A run that went on from step 10 since 20 is damaged keeps the newest steps of its own."""
    with RunCheckpointManager(layout, save_total_limit=1) as manager:
        manager.save_checkpoint(20, files={"step-000020.pt": b"abc" * 100})
        damage(layout, "step-000020.pt")
        for step in (10, 15):
            manager.save_checkpoint(step, files={f"step-{step:06}.pt": b"abc"})
        assert manager.complete_steps() == [15, 20]
        assert manager.fetch_latest(tmp_path / "fetched") == 15


def test_a_step_that_is_saved_again_has_no_mark_meanwhile(layout: RunLayout) -> None:
    with RunCheckpointManager(layout) as manager:
        manager.save_checkpoint(3, files={"a": b"old"})
        manager.discard(3)
        files = manager.upload({"a": b"newer"})
        assert manager.latest() is None
        manager.commit(3, files)
        assert manager.latest() == 3


def test_the_oldest_go_beyond_the_limit(layout: RunLayout) -> None:
    with RunCheckpointManager(layout, save_total_limit=2) as manager:
        for step in (10, 20, 30):
            manager.save_checkpoint(step, files={f"checkpoint-{step}/model": b"abc"})
        assert manager.complete_steps() == [20, 30]
    assert "checkpoints/checkpoint-10/model" not in keys(layout)


def test_a_file_cannot_be_called_as_a_mark_nor_leave_the_folder(layout: RunLayout, tmp_path: Path) -> None:
    backend, prefix = open_storage(layout.checkpoints_uri)
    with RunCheckpointManager(layout) as manager, backend:
        with pytest.raises(UsageError, match=r"cannot be called 'step-000001.json'"):
            manager.save_checkpoint(1, files={"step-000001.json": b""})
        with pytest.raises((UsageError, StorageError)):
            manager.save_checkpoint(1, files={"../../../escaped": b""})
        mark = json.dumps({"step": 1, "files": [{"name": "../escaped", "nbytes": 0}]})
        backend.write(f"{prefix}/step-000001.json" if prefix else "step-000001.json", mark.encode())
        with pytest.raises((UsageError, StorageError)):
            manager.fetch(1, tmp_path / "fetched")
    assert not list(tmp_path.rglob("escaped"))


SAVER = """
import sys
from unified.training.checkpoints import RunCheckpointManager
from unified.training.layout import RunLayout

manager = RunCheckpointManager(RunLayout(sys.argv[1], "run-1", "meta"), save_total_limit=2)
step = (manager.latest() or 0) + 1
while True:
    files = {f"checkpoint-{step}/{name}": bytes([step % 256]) * 50_000 for name in "abc"}
    manager.save_checkpoint(step, {"loss": 1.0}, files)
    print(step, flush=True)
    step += 1
"""


def test_a_kill_at_any_moment_leaves_a_complete_step(tmp_path: Path) -> None:
    layout = RunLayout(str(tmp_path / "runs"), "run-1", "meta")
    latest = 0
    for number in range(6):
        with subprocess.Popen(
            [sys.executable, "-c", SAVER, layout.base_uri], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            first = int(process.stdout.readline())
            assert first == latest + 1 or number == 0
            time.sleep(0.01 + 0.013 * number)
            os.kill(process.pid, signal.SIGKILL)
            said = [first, *(int(line) for line in process.stdout.read().splitlines())]
        with RunCheckpointManager(layout) as manager:
            found = manager.latest()
            assert found is not None
            assert found in (said[-1], said[-1] + 1)
            for name, path in manager.fetch(found, tmp_path / f"fetched-{number}").items():
                assert path.read_bytes() == bytes([found % 256]) * 50_000, name
        latest = found
