"""Checkpoints in S3: moto's HTTP server in a process of its own."""

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.io.checkpoint.test_checkpoint_crash import kill_at_random
from tests.io.checkpoint.test_checkpoint_manager import save_now
from tests.support.programs.checkpoint_killer import STAGES
from tests.support.s3 import SECRET_KEY, Asked, S3Server, faulty
from unified.checkpoint import CheckpointFallbackWarning, CheckpointManager
from unified.core.backoff import Backoff
from unified.errors import CheckpointSaveError
from unified.storage import S3Backend

NUM_POINTS = int(os.environ.get("UNIFIED_TEST_S3_KILL_POINTS", "12"))


def keys(bucket: str) -> list[str]:
    with S3Backend(bucket, "us-east-1") as backend:
        return [stat.key for stat in backend.list("")]


async def test_the_documents_calls(bucket: str) -> None:
    async with CheckpointManager("/checkpoints", backend="s3", bucket=bucket) as manager:
        with pytest.raises(FileNotFoundError):
            await manager.load(step=0)
        for step in (1, 2):
            await manager.save_async(b"state %d" % step, step=step)
        assert await manager.list_checkpoints() == [1, 2]
        assert await manager.load(step=0) == b"state 2"
    assert [key for key in keys(bucket) if key.endswith(".json")] == [
        "checkpoints/step-000001.json",
        "checkpoints/step-000002.json",
    ]


def test_the_bucket_of_the_settings(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIFIED_STORAGE_BUCKET", bucket)
    with CheckpointManager("/runs", backend="s3", run_id="r1", framework="hf") as manager:
        manager.persist_config({"lr": 1})
        manager.save_checkpoint(1, {"loss": 1.0})
    assert keys(bucket) == [
        "runs/r1/framework=hf/checkpoints/step-000001.json",
        "runs/r1/framework=hf/config/run.json",
        "runs/r1/framework=hf/logs/.keep",
    ]


def test_old_ones_are_swept_and_damage_is_noticed(bucket: str) -> None:
    with CheckpointManager(f"s3://{bucket}/run", keep_last_n=2, compression="gzip") as manager:
        for step in (1, 2, 3):
            save_now(manager, b"state %d" % step, step)
        assert len(keys(bucket)) == 4
        (part,) = manager.store.manifest(3).parts
        manager.store.backend.write(manager.store.key(part.key), b"x" * part.size_bytes)
        with pytest.warns(CheckpointFallbackWarning, match="step 3 is damaged"):
            assert manager.load_bytes() == b"state 2"


def test_a_state_of_several_parts_comes_back(bucket: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.rand(5_000_000)
    with CheckpointManager(f"s3://{bucket}") as manager:
        manager.save({"w": weight}, 1)
        assert torch.equal(manager.load_state()["w"], weight)
        found = manager.materialize_checkpoint(1, tmp_path)
        assert torch.equal(torch.load(found / "state.pt")["w"], weight)


def test_writers_of_one_step_leave_one_checkpoint(bucket: str) -> None:
    ranks = [CheckpointManager(f"s3://{bucket}", rank=rank, world_size=3) for rank in range(3)]
    for manager in ranks:
        manager.save_bytes(b"same", 1)
    with ThreadPoolExecutor(len(ranks)) as threads:
        list(threads.map(CheckpointManager.close, ranks))
    assert len(keys(bucket)) == 2


def test_a_store_that_says_no_is_reported_and_the_secret_is_in_no_log(
    s3_environment: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    def deny_writes(asked: Asked) -> str | None:
        return "deny" if asked.method in ("PUT", "POST") else None

    with faulty(s3_environment, deny_writes) as url, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", url)
        manager = CheckpointManager(f"s3://{bucket}", backoff=Backoff(first_s=0.0))
        manager.save_bytes(b"x", 1)
        with pytest.raises(CheckpointSaveError, match="step 1") as caught:
            manager.close()
    assert isinstance(caught.value.__cause__, PermissionError)
    assert keys(bucket) == []
    assert SECRET_KEY not in caplog.text


def crash_after(num_writes: int) -> Callable[[Asked], str | None]:
    """Requests that change something are lost from the nth on: what a store sees of a process that is killed."""
    left = [num_writes]

    def decide(asked: Asked) -> str | None:
        if asked.method not in ("PUT", "POST", "DELETE"):
            return None
        left[0] -= 1
        return "deny" if left[0] < 0 else None

    return decide


@pytest.mark.parametrize("num_writes", [0, 1, 2, 3])
def test_whatever_request_is_the_last_the_latest_loads(
    s3_environment: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch, num_writes: int
) -> None:
    with CheckpointManager(f"s3://{bucket}", keep_last_n=1) as before:
        before.save_bytes(b"before", 1)
    with faulty(s3_environment, crash_after(num_writes)) as url, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", url)
        manager = CheckpointManager(f"s3://{bucket}", keep_last_n=1)
        manager.save_bytes(b"after", 2)
        try:
            manager.close()
        except CheckpointSaveError:
            assert num_writes < 2
        else:
            assert num_writes >= 2
    with CheckpointManager(f"s3://{bucket}") as reader:
        assert reader.load_bytes() == (b"before" if num_writes < 2 else b"after")


@pytest.mark.parametrize(
    ("num_points", "seed"),
    [
        (NUM_POINTS, 7),
        *(pytest.param(100, seed, marks=[pytest.mark.slow, pytest.mark.timeout(900)]) for seed in (7, 8)),
    ],
)
def test_kill_9_at_random_points_leaves_the_latest_loadable(
    s3_environment: S3Server, num_points: int, seed: int
) -> None:
    found = kill_at_random(f"s3://{s3_environment.make_bucket()}", num_points, seed=seed, timeout_s=880.0)
    assert found["latest"] > num_points // 4, "the processes were killed before they saved anything"
    assert num_points < 100 or set(found["stages"]) == STAGES, found
