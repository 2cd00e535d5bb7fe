"""Whatever moment a saving process dies at, the latest checkpoint loads."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs.checkpoint_killer import IN_A_PART, STAGES
from unified.checkpoint import CheckpointManager
from unified.storage import LocalBackend
from unified.storage.backend import Buffer, Source, Stat

KILLER = Path(__file__).parents[2] / "support/programs/checkpoint_killer.py"
NUM_POINTS = int(os.environ.get("UNIFIED_TEST_KILL_POINTS", "200"))
NUM_STATE_POINTS = 40
STATES = {step: bytes([step]) * 5_000_000 for step in (1, 2, 3)}


class Crash(BaseException):
    """The process is no more: nobody catches this but the test."""


class Crashing(LocalBackend):
    """A store that crashes at its nth action: before and after each call, and between two pieces of a write."""

    def __init__(self, root: Path, crash_at: int) -> None:
        super().__init__(root, fsync=False)
        self.actions_left = crash_at

    def act(self) -> None:
        self.actions_left -= 1
        if self.actions_left < 0:
            raise Crash

    def write(self, key: str, data: Source, *, if_absent: bool = False) -> Stat:
        self.act()
        stat = super().write(key, data if isinstance(data, bytes) else self._pieces(data), if_absent=if_absent)  # type: ignore[arg-type]
        self.act()
        return stat

    def replace(self, key: str, data: Source, etag: str) -> Stat:
        self.act()
        stat = super().replace(key, data, etag)
        self.act()
        return stat

    def delete(self, key: str) -> None:
        self.act()
        super().delete(key)
        self.act()

    def _pieces(self, data: Iterator[Buffer]) -> Iterator[Buffer]:
        for piece in data:
            self.act()
            yield piece


def run_until_crash(root: Path, crash_at: int) -> list[int]:
    """Save three steps, the third one again, keeping two; steps whose save returned before the crash."""
    from unified.checkpoint.location import WriterIdentity
    from unified.checkpoint.payload import BytesPayload
    from unified.checkpoint.store import CheckpointStore, SaveRequest

    store = CheckpointStore(Crashing(root, crash_at), "", WriterIdentity(name="w"))
    done: list[int] = []
    for token, step in enumerate((1, 2, 3, 3)):
        try:
            store.write(SaveRequest(step=step, token=f"t{token}", payloads={"": BytesPayload(STATES[step])}))
            done.append(step)
            store.sweep(2, {step})
        except Crash:
            break
    return done


def test_a_crash_at_every_action_leaves_the_latest_loadable(tmp_path: Path) -> None:
    crash_at = num_loaded = 0
    while True:
        root = tmp_path / str(crash_at)
        done = run_until_crash(root, crash_at)
        with CheckpointManager(root) as manager:
            steps = manager.steps()
            assert not done or steps[-1] >= done[-1]
            for step in steps:
                assert manager.load_bytes(step, exact=True) == STATES[step]
                num_loaded += 1
        if len(done) == 4 and steps == [2, 3]:
            break
        crash_at += 1
    assert crash_at > 20
    assert num_loaded > 20


def kill_at_random(place: str, num_points: int, *what: str, seed: int = 7, timeout_s: float = 280.0) -> dict[str, Any]:
    """Kill so many processes inside a save; the latest step then, and at which stages they were."""
    command = [sys.executable, str(KILLER), place, str(num_points), str(seed), *what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert sum(found["stages"].values()) == num_points
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kill_9_at_random_points_leaves_the_latest_loadable(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    found = kill_at_random(str(place), NUM_POINTS)
    assert found["latest"] > NUM_POINTS // 4, "the processes were killed before they saved anything"
    assert set(found["stages"]) == STAGES, found

    for path in place.iterdir():  # what the killed ones left is old now
        os.utime(path, (path.stat().st_mtime - 10_000,) * 2)
    with CheckpointManager(place, keep_last_n=2) as manager:
        manager.save_bytes(b"the end", found["latest"] + 1)
    assert len(list(place.iterdir())) == 4, "files of killed saves stay"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kill_9_while_tensors_go_to_the_disk_in_blocks_leaves_the_latest_loadable(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = kill_at_random(str(tmp_path / "checkpoints"), NUM_STATE_POINTS, "states")
    assert found["latest"] > NUM_STATE_POINTS // 4, "the processes were killed before they saved anything"
    assert found["stages"].get(IN_A_PART, 0) > NUM_STATE_POINTS // 4, found["stages"]
