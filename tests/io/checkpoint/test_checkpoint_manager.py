"""`CheckpointManager` on a real file system."""

import asyncio
import gzip
import io
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.deadlines import missed
from unified.checkpoint import (
    CheckpointFallbackWarning,
    CheckpointManager,
    CheckpointUnverifiedWarning,
    Manifest,
    manifest,
)
from unified.core.backoff import Backoff
from unified.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    CheckpointTimeoutError,
    OptionError,
    UsageError,
)
from unified.storage import LocalBackend
from unified.storage.backend import Source, Stat

AT_ONCE = Backoff(first_s=0.0)


class Gated(LocalBackend):
    """A store whose writes wait for the test, and fail when it says so."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, fsync=False)
        self.may_go = threading.Event()
        self.may_go.set()
        self.begun = threading.Event()
        self.errors: list[Exception] = []
        """One for each write that is to fail, in turn."""

    def write(self, key: str, data: Source, *, if_absent: bool = False) -> Stat:
        self.begun.set()
        assert self.may_go.wait(100)
        if self.errors:
            raise self.errors.pop(0)
        return super().write(key, data, if_absent=if_absent)


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[Gated]:
    store = Gated(tmp_path / "gated")
    yield store
    store.may_go.set()


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def payload_of(path: Path, step: int) -> Path:
    (found,) = path.glob(f"step-{step:06d}.*.bin")
    return found


def checksum_of(data: bytes) -> str:
    checksum = manifest.Checksum()
    checksum.update(data)
    return checksum.text


def save_now(manager: CheckpointManager, data: bytes, step: int) -> None:
    manager.save_bytes(data, step)
    manager.wait()


def begin_held_up(gated: Gated, manager: CheckpointManager) -> None:
    gated.may_go.clear()
    manager.save_bytes(b"1", 1)
    assert gated.begun.wait(100)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def do_damage(path: Path, damage: str) -> None:
    match damage:
        case "remove":
            path.unlink()
        case "cut" | "manifest":
            os.truncate(path, 5)
        case _:
            flip(path)


async def test_the_documents_calls(tmp_path: Path) -> None:
    manager = CheckpointManager(str(tmp_path), backend="local")
    with pytest.raises(FileNotFoundError):
        await manager.load(step=0)
    for step in (100, 200, 300, 400, 500):
        await manager.save_async(b"state of %d" % step, step=step)
    assert await manager.list_checkpoints() == [100, 200, 300, 400, 500]
    assert await manager.load(step=300) == b"state of 300"
    assert await manager.load(step=0) == b"state of 500"
    assert await manager.load() == await manager.load("latest") == b"state of 500"
    await asyncio.to_thread(manager.close)


def test_a_manifest_says_what_there_is(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, rank=2, world_size=4) as manager:
        manager.save_bytes(b"abc", 1, metadata={"loss": 0.5})
    found = json.loads((tmp_path / "step-000001.json").read_text())
    assert (found["step"], found["size_bytes"], found["checksum"]) == (1, 3, checksum_of(b"abc"))
    assert (found["rank"], found["world_size"], found["metadata"]) == (2, 4, {"loss": 0.5})
    assert found["saved_at"] > 1.7e9
    assert payload_of(tmp_path, 1).read_bytes() == b"abc"


def test_a_checkpoint_is_read_with_and_without_the_package_of_its_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xxhash")
    with CheckpointManager(tmp_path) as manager:
        save_now(manager, b"of xxh3", 1)
        monkeypatch.setattr(manifest, "_xxhash", lambda: None)
        save_now(manager, b"of crc32", 2)
        assert [manager.checkpoint(step).checksum.partition(":")[0] for step in (1, 2)] == ["xxh3_64", "crc32"]
        assert manager.load_bytes(2) == b"of crc32"
        with pytest.warns(CheckpointUnverifiedWarning, match=r"pip install 'unified-runtime\[xxhash\]'"):
            assert manager.load_bytes(1) == b"of xxh3"
        payload_of(tmp_path, 1).write_bytes(b"cut")
        with pytest.raises(CheckpointCorruptError, match="3 bytes"):
            manager.load_bytes(1, exact=True)
        monkeypatch.undo()
        assert manager.load_bytes(2) == b"of crc32"
        payload_of(tmp_path, 1).write_bytes(b"of XXH3")
        with pytest.raises(CheckpointCorruptError, match="xxh3_64"):
            manager.load_bytes(1, exact=True)


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_compressed_data_come_back_whatever_the_reader_was_set_to(tmp_path: Path, compression: str) -> None:
    if compression == "zstd" and sys.version_info < (3, 14):
        pytest.importorskip("backports.zstd")
    data = b"weights " * 100_000
    with CheckpointManager(tmp_path, compression=compression) as manager:
        manager.save_bytes(data, 1)
    assert payload_of(tmp_path, 1).stat().st_size < len(data) // 10
    with CheckpointManager(tmp_path) as reader:
        assert reader.load_bytes(1) == data
    if compression == "gzip":
        assert gzip.decompress(payload_of(tmp_path, 1).read_bytes()) == data


def test_only_the_last_n_stay(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last_n=2) as manager:
        for step in range(5):
            save_now(manager, b"x", step)
        assert manager.steps() == [3, 4]
    assert len(names(tmp_path)) == 4


async def test_interval_steps_saves_at_its_multiples_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(tmp_path, interval_steps=10) as manager:
        assert [step for step in range(25) if manager.save_bytes(b"x", step)] == [0, 10, 20]
        assert manager.steps() == [0, 10, 20]
        assert not manager.should_save(7)
        assert caplog.text.count("event=checkpoint-passed-over step=1: ") == 1
        assert caplog.text.count("event=checkpoint-passed-over") == 1
        await manager.save_async(b"the last", 24, force=True)
        assert manager.load_bytes() == b"the last"


def test_zero_is_step_zero_where_it_is_said(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save_bytes(b"zero", 0)
        manager.save_bytes(b"one", 1)
        assert manager.load_bytes(0, exact=True) == b"zero"
        assert manager.load_bytes(0) == b"one"


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so(tmp_path: Path, damage: str) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save_bytes(b"state %d" % step * 10, step)
        manager.wait()
        for step in (2, 3):
            do_damage(
                tmp_path / f"step-{step:06d}.json" if damage == "manifest" else payload_of(tmp_path, step), damage
            )
        with pytest.warns(CheckpointFallbackWarning, match=r"step 3 is damaged.* step 2 is damaged.*step 1 instead"):
            assert manager.load_bytes() == b"state 1" * 10
        assert manager.last_load is not None
        assert manager.last_load.step == 1
        assert [step for step, _ in manager.last_load.skipped] == [3, 2]
        with pytest.raises(CheckpointCorruptError, match="step 3"):
            manager.load_bytes(3, exact=True)


def test_damaged_ones_never_push_out_the_last_good_one(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last_n=1) as manager:
        save_now(manager, b"good", 1)
        save_now(manager, b"soon bad", 2)
        assert manager.steps() == [2]
        flip(payload_of(tmp_path, 2))
        with pytest.raises(CheckpointCorruptError, match="No checkpoint can be loaded"):
            manager.load_bytes()
        manager.save_bytes(b"good again", 3)
        assert manager.load_bytes() == b"good again"


def test_missing_steps_are_named(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save_bytes(b"x", 7)
        with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint of step 8 in .*: there are those of steps 7"):
            manager.load_bytes(8)
        with pytest.raises(UsageError, match="'newest'"):
            manager.load_bytes("newest")  # type: ignore[arg-type]


def test_bad_arguments_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bad: list[tuple[Any, dict[str, Any], str]] = [
        (tmp_path, {"keep_last_n": 0}, "keep_last_n"),
        (tmp_path, {"interval_steps": -1}, "interval_steps"),
        (tmp_path, {"compression": "lz4"}, "lz4"),
        (tmp_path, {"backend": "gcs"}, "gcs"),
        (tmp_path, {"when_full": "drop"}, "when_full"),
        (tmp_path, {"run_id": "r"}, "together"),
        (tmp_path, {"run_id": "../r", "framework": "hf"}, "run_id"),
        (tmp_path, {"rank": 4, "world_size": 4}, "rank 4"),
        (tmp_path / "file", {}, "directory"),
        ("/checkpoints", {"backend": "s3"}, "bucket"),
    ]
    for path, options, word in bad:
        with pytest.raises(UsageError, match=word):
            CheckpointManager(path, **options)
    with CheckpointManager(tmp_path / "store") as manager:
        with pytest.raises(UsageError, match="0 bytes"):
            manager.save_bytes(b"", 1)
        with pytest.raises(UsageError, match="whole number"):
            manager.save_bytes(b"x", -1)
        with pytest.raises(UsageError, match="JSON"):
            manager.save_bytes(b"x", 1, metadata={"a": object()})
        assert manager.steps() == []
    with pytest.raises(UsageError, match="closed"):
        manager.save_bytes(b"x", 1)


def test_of_saves_that_wait_the_newest_win(gated: Gated, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager("", gated, max_waiting=1) as manager:
        begin_held_up(gated, manager)
        for step in (2, 3, 4):
            manager.save_bytes(b"%d" % step, step)
        with pytest.raises(CheckpointTimeoutError, match="steps 1, 4"):
            manager.wait(timeout=missed(0.01))
        gated.may_go.set()
        assert manager.steps() == [1, 4]
    assert caplog.text.count("event=checkpoint-skipped") == 2


def test_with_wait_every_save_is_written(gated: Gated) -> None:
    with CheckpointManager("", gated, max_waiting=1, when_full="wait", keep_last_n=None) as manager:
        begin_held_up(gated, manager)
        manager.save_bytes(b"2", 2)
        third = threading.Thread(target=manager.save_bytes, args=(b"3", 3))
        third.start()
        third.join(missed(0.05))
        assert third.is_alive()
        gated.may_go.set()
        third.join(100)
        assert manager.steps() == [1, 2, 3]


def test_a_failed_save_is_tried_again(gated: Gated) -> None:
    with CheckpointManager("", gated, backoff=AT_ONCE) as manager:
        gated.errors = [OSError("the disk hiccups"), OSError("again")]
        save_now(manager, b"x", 1)
        assert manager.load_bytes(1) == b"x"


def test_a_save_that_fails_for_good_is_reported_once_by_the_next_call(
    gated: Gated, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager("", gated, backoff=AT_ONCE, max_tries=2) as manager:
        save_now(manager, b"before", 1)
        gated.errors = [OSError("full"), OSError("full")]
        manager.save_bytes(b"x", 2)
        assert manager.load_bytes() == b"before"  # which waits for the save to fail
        with pytest.raises(CheckpointSaveError, match=r"step 2 \(tries: 2\): OSError: full") as caught:
            manager.save_bytes(b"y", 3)
        assert caught.value.steps == (2,)
        assert manager.steps() == [1, 3]
        manager.wait()
    assert "event=checkpoint-failed step=2 tries=2" in caplog.text


def test_a_call_that_is_wrong_swallows_no_failure_and_drops_no_save(gated: Gated) -> None:
    with CheckpointManager("", gated, max_waiting=1, max_tries=1) as manager:
        gated.errors = [OSError("full")]
        begin_held_up(gated, manager)
        manager.save_bytes(b"2", 2)
        for data, step in ((b"", 2), (b"x", -1)):
            with pytest.raises(UsageError):
                manager.save_bytes(data, step)
        gated.may_go.set()
        assert manager.steps() == [2]
        with pytest.raises(UsageError):
            manager.save_bytes(b"", 3)
        with pytest.raises(CheckpointSaveError, match="step 1"):
            manager.wait()


def test_what_is_not_allowed_is_not_tried_again(gated: Gated) -> None:
    with CheckpointManager("", gated, max_tries=100) as manager:
        gated.errors = [PermissionError("denied")]
        manager.save_bytes(b"x", 1)
        with pytest.raises(CheckpointSaveError, match=r"tries: 1.*denied"):
            manager.wait()


def test_what_cannot_be_pickled_is_not_tried_again(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with CheckpointManager(tmp_path, max_tries=100) as manager:
        manager.save({"model": torch.ones(2), "wrong": lambda: None}, 1)
        with pytest.raises(CheckpointSaveError, match=r"tries: 1.*cannot be pickled: .*Remove these"):
            manager.wait()


def test_a_run_that_went_back_saves_its_steps_again(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as first:
        first.save_bytes(b"first incarnation", 10)
        first.save_bytes(b"first incarnation", 20)
    with CheckpointManager(tmp_path) as second:
        save_now(second, b"second incarnation", 10)
        assert second.load_bytes(10) == b"second incarnation"
        assert second.load_bytes() == b"first incarnation"
    assert len(names(tmp_path)) == 4


def test_ranks_that_all_save_a_step_leave_one_checkpoint(tmp_path: Path) -> None:
    ranks = [CheckpointManager(tmp_path, rank=rank, world_size=4) for rank in range(4)]
    for step in (1, 2):
        for manager in ranks:
            manager.save_bytes(b"same", step)
    for manager in ranks:
        manager.close()
    assert ranks[0].store.steps() == [1, 2]
    assert len(names(tmp_path)) == 4


def test_files_of_a_crashed_save_are_removed_when_they_are_old(tmp_path: Path) -> None:
    for name, age_s in (("step-000001.dead.bin", 10_000), ("step-000002.live.bin", 0)):
        path = tmp_path / name
        path.write_bytes(b"left")
        os.utime(path, (path.stat().st_mtime - age_s,) * 2)
    (tmp_path / "notes.txt").write_text("mine")
    with CheckpointManager(tmp_path) as manager:
        save_now(manager, b"x", 3)
    left = names(tmp_path)
    assert "step-000001.dead.bin" not in left
    assert {"step-000002.live.bin", "notes.txt"} <= {*left}


def test_those_who_want_to_know_are_told_of_each_checkpoint(tmp_path: Path) -> None:
    told: list[Manifest] = []
    with CheckpointManager(tmp_path, on_saved=told.append) as manager:
        manager.save_bytes(b"abc", 4)
    assert [(each.step, each.size_bytes) for each in told] == [(4, 3)]


def test_a_place_with_brackets_in_its_name(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run[1]") as manager:
        manager.save_bytes(b"x", 1)
    assert (tmp_path / "run[1]" / "step-000001.json").exists()


def test_a_state_dict_comes_back_as_it_was_when_save_returned(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 64)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "empty": torch.empty(0, 3)}
    expected = {name: value.clone() for name, value in state["model"].items()}
    with CheckpointManager(tmp_path) as manager:
        manager.save(state, 7)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        state["step"] = 8
        loaded = manager.load_state()
        assert loaded["step"] == 7
        assert loaded["empty"].shape == (0, 3)
        assert loaded["model"].keys() == expected.keys()
        assert all(torch.equal(loaded["model"][name], value) for name, value in expected.items())
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        same = torch.load(io.BytesIO(manager.load_bytes()))
        assert torch.equal(same["model"]["0.weight"], expected["0.weight"])


def test_tied_tensors_stay_tied_and_views_are_saved_alone(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.arange(1_000_000, dtype=torch.float32)
    with CheckpointManager(tmp_path) as manager:
        manager.save({"a": weight, "b": weight.detach(), "row": weight[5:8], "t": weight.view(1000, 1000).t()}, 1)
        loaded = manager.load_state()
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert loaded["row"].tolist() == [5, 6, 7]
    assert torch.equal(loaded["t"], weight.view(1000, 1000).t())
    assert payload_of(tmp_path, 1).stat().st_size < 2.1 * weight.nbytes


def test_memory_for_copies_is_used_again(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from unified.tensors.host_buffers import BufferPool, stage_state

    pool = BufferPool(one_size=True)
    places = set()
    for value in range(3):
        staged = stage_state({"w": torch.full((1000,), float(value))}, pool)
        assert staged.value["w"][0] == value
        places.add(staged.memory.data_ptr() if staged.memory is not None else 0)
        staged.release()
    assert len(places) == 1


def test_a_failed_save_of_tensors_is_tried_again_from_the_beginning(gated: Gated) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.rand(3_000_000)
    with CheckpointManager("", gated, backoff=AT_ONCE) as manager:
        gated.errors = [OSError("hiccup")]
        manager.save({"w": weight}, 1)
        assert torch.equal(manager.load_state()["w"], weight)


def test_objects_need_trust(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with CheckpointManager(tmp_path) as manager:
        manager.save({"path": Path("here")}, 1)
        with pytest.raises(CheckpointError, match="weights_only=False"):
            manager.load_state()
        assert manager.load_state(weights_only=False) == {"path": Path("here")}


def test_what_is_not_given_is_as_the_settings_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "runtime.toml"
    config.write_text('[checkpoint]\nkeep_last_n = 2\ninterval_steps = 10\ncompression = "gzip"\n')
    monkeypatch.setenv("UNIFIED_CONFIG", str(config))
    with CheckpointManager(tmp_path / "store") as manager:
        for step in (10, 15, 20, 30):
            manager.save_bytes(b"x" * 10_000, step)
        manager.wait()
        assert manager.steps() == [20, 30]
        latest = manager.latest_checkpoint()
        assert latest is not None
        assert latest.compression == "gzip"
        assert manager.load_bytes() == b"x" * 10_000
    with CheckpointManager(tmp_path / "other", keep_last_n=None, interval_steps=None, compression=None) as manager:
        for step in (1, 2, 3):
            manager.save_bytes(b"x", step)
        assert manager.steps() == [1, 2, 3]
    monkeypatch.setenv("UNIFIED_CHECKPOINT_KEEP_LAST_N", "0")
    with pytest.raises(OptionError, match="UNIFIED_CHECKPOINT_KEEP_LAST_N"):
        CheckpointManager(tmp_path / "third")
