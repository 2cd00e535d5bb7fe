"""The layout of a training service's run: checkpoints, logs and config beside each other."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pydantic
import pytest

from tests.io.checkpoint.test_checkpoint_manager import save_now
from unified.checkpoint import CheckpointFallbackWarning, CheckpointManager
from unified.errors import CheckpointCorruptError, CheckpointNotFoundError, UsageError

RUN = Path("aml_ruleset_v4") / "framework=hf"


@pytest.fixture
def manager(tmp_path: Path) -> CheckpointManager:
    return CheckpointManager(tmp_path, run_id="aml_ruleset_v4", framework="hf", keep_last_n=2)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    path = tmp_path / "output"
    (path / "nested").mkdir(parents=True)
    (path / "model.bin").write_bytes(b"weights" * 1000)
    (path / "nested" / "state.json").write_text("{}")
    return path


def tree(path: Path) -> list[str]:
    return sorted(each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file())


def test_the_layout_is_the_documents(tmp_path: Path, manager: CheckpointManager) -> None:
    manager.persist_config({"lr": 3e-5, "output": Path("out")})
    manager.save_checkpoint(1, {"loss": 2.5})
    manager.save_checkpoint(2)
    assert tree(tmp_path / RUN) == [
        "checkpoints/step-000001.json",
        "checkpoints/step-000002.json",
        "config/run.json",
        "logs/.keep",
    ]
    assert json.loads((tmp_path / RUN / "config/run.json").read_text()) == {"lr": 3e-5, "output": "out"}
    latest = manager.latest_checkpoint()
    assert latest is not None
    assert latest.step == 2
    assert manager.checkpoint(1).metadata == {"loss": 2.5}


def test_configurations_of_every_kind(tmp_path: Path, manager: CheckpointManager) -> None:
    from omegaconf import OmegaConf

    @dataclass
    class Config:
        lr: float = 0.1

    class Model(pydantic.BaseModel):
        lr: float = 0.1

    kept = tmp_path / RUN / "config/run.json"
    for config in (Config(), argparse.Namespace(lr=0.1), OmegaConf.create({"lr": 0.1}), Model()):
        manager.persist_config(config)
        assert json.loads(kept.read_text()) == {"lr": 0.1}
    with pytest.raises(UsageError, match="int"):
        manager.persist_config(3)


def test_a_checkpoint_of_files_comes_back(tmp_path: Path, manager: CheckpointManager, output: Path) -> None:
    manager.save_checkpoint(5, {"epoch": 1}, directory=output)
    found = manager.materialize_checkpoint(manager.latest_checkpoint(), tmp_path / "back")
    assert found == tmp_path / "back" / "checkpoint-5"
    assert tree(found) == ["model.bin", "nested/state.json", "step-000005.json"]
    assert (found / "model.bin").read_bytes() == (output / "model.bin").read_bytes()
    again = manager.materialize_checkpoint(5, tmp_path / "back")
    assert tree(tmp_path / "back") == ["checkpoint-5/" + name for name in tree(again)]


def test_files_are_swept_with_their_checkpoint(tmp_path: Path, manager: CheckpointManager, output: Path) -> None:
    for step in (1, 2, 3):
        manager.save_checkpoint(step, directory=output)
    assert manager.steps() == [2, 3]
    assert len(tree(tmp_path / RUN)) == 2 * 3


def test_without_a_directory_it_is_a_new_one(manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = Path(manager.store.backend.root) / "tmp"  # type: ignore[attr-defined]
    temporary.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with pytest.raises(CheckpointNotFoundError):
        manager.materialize_checkpoint()
    manager.save_bytes(b"data", 1)
    assert (manager.materialize_checkpoint() / "data.bin").read_bytes() == b"data"
    assert len(list(temporary.iterdir())) == 1


def test_damaged_files_are_not_handed_out(tmp_path: Path, manager: CheckpointManager, output: Path) -> None:
    for step in (1, 2):
        manager.save_checkpoint(step, directory=output)
    (model,) = (tmp_path / RUN / "checkpoints").glob("step-000002.*.parts/model.bin")
    model.write_bytes(b"weight!" * 1000)
    with pytest.raises(CheckpointCorruptError, match="checksum"):
        manager.materialize_checkpoint(2, tmp_path / "back")
    assert tree(tmp_path / "back") == []
    model.unlink()
    with pytest.warns(CheckpointFallbackWarning, match="step 2"):
        latest = manager.latest_checkpoint()
    assert latest is not None
    assert latest.step == 1


def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path, manager: CheckpointManager, output: Path) -> None:
    manager.save_checkpoint(1, directory=output)
    path = tmp_path / RUN / "checkpoints/step-000001.json"
    path.write_text(path.read_text().replace('"name": "model.bin"', '"name": "../../model.bin"'))
    with pytest.raises(CheckpointCorruptError, match="outside"):
        manager.materialize_checkpoint(1, tmp_path / "back")


def test_directories_are_synced_where_they_changed(tmp_path: Path, manager: CheckpointManager, output: Path) -> None:
    for path in output.rglob("*"):
        os.utime(path, (1, 1))
    assert [Path(key).name for key in manager.sync_directory(output, "logs")] == ["model.bin", "state.json"]
    assert manager.sync_directory(output, "logs") == []
    (output / "nested" / "state.json").write_text('{"a": 1}')
    assert [Path(key).name for key in manager.sync_directory(output, "logs")] == ["state.json"]
    assert tree(tmp_path / RUN / "logs") == tree(output)
    with pytest.raises(UsageError, match="no directory"):
        manager.sync_directory(output / "missing")


def test_bytes_and_states_are_not_mixed_up_with_files(manager: CheckpointManager, output: Path) -> None:
    save_now(manager, b"data", 1)
    manager.save_checkpoint(2, directory=output)
    assert manager.load_bytes() == b"data"
    with pytest.raises(Exception, match="materialize_checkpoint"):
        manager.load_bytes(2)


def test_an_empty_directory_is_refused(tmp_path: Path, manager: CheckpointManager) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no files"):
        manager.save_checkpoint(1, directory=tmp_path / "empty")
    assert manager.steps() == []


END_WITHOUT_WAITING = """
import sys, time
from unified.checkpoint import CheckpointManager
def main():
    manager = CheckpointManager(sys.argv[1], on_saved=lambda manifest: time.sleep(0.2))
    for step in (1, 2):
        manager.save_bytes(b"x" * 10_000_000, step)  # the second waits when nobody knows the manager any more
main()
"""

SAVE_AFTER_FORK = """
import os, sys
from unified.checkpoint import CheckpointManager
from unified.errors import UsageError
manager = CheckpointManager(sys.argv[1])
if os.fork() == 0:
    try:
        manager.save_bytes(b"x", 1)
    except UsageError:
        sys.exit(7)  # an orderly end, which must not wait for a thread that is not here
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
"""


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 2),
    reason="Python 3.12.0 and 3.12.1 start no thread once the main thread has ended (cpython 113964)",
)
def test_a_program_that_ends_has_its_saves_written(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", END_WITHOUT_WAITING, str(tmp_path)], check=True, timeout=100)
    with CheckpointManager(tmp_path) as reader:
        assert reader.steps() == [1, 2]
        assert len(reader.load_bytes()) == 10_000_000


def test_a_forked_process_is_told_to_make_its_own(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SAVE_AFTER_FORK, str(tmp_path)], check=True, timeout=100)
