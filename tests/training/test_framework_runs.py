"""What the hf and the nemo framework have in common: steps, checkpoints, and how a run goes on."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training_runs import TINY, TrainingRuns
from unified.api.builder import DLJobBuilder
from unified.storage import open_storage
from unified.testing import eventually

pytestmark = pytest.mark.timeout(240)
OF_HF = ["config.json", "generation_config.json", "model.safetensors", "optimizer.pt", "scheduler.pt"]
OF_HF += ["trainer_state.json", "training_args.bin"]


def weights(runs: TrainingRuns, step: int, run_id: str) -> dict[str, torch.Tensor]:
    """The model of a checkpoint."""
    files = runs.fetch(step, run_id)
    if runs.framework == "nemo":
        state: dict[str, torch.Tensor] = torch.load(files[f"step-{step:06}.ckpt"], weights_only=True)["state_dict"]
        return state
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = load_file(files[f"checkpoint-{step}/model.safetensors"])
    return found


def assert_same_end(runs: TrainingRuns, step: int, *run_ids: str) -> None:
    """The last checkpoints of two runs are those of the same steps, on the same rows, in the same order."""
    first, second = (weights(runs, step, run_id) for run_id in run_ids)
    torch.testing.assert_close(first, second)
    losses = [runs.checkpoints(run_id).read_mark(step).metrics["eval_loss"] for run_id in run_ids]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert all(runs.checkpoints(run_id).latest() == step for run_id in run_ids)


def names(runs: TrainingRuns, run_id: str = "run") -> list[str]:
    """All objects of a run."""
    backend, prefix = open_storage(runs.checkpoints(run_id).layout.prefix)
    with backend:
        return [stat.key.removeprefix(prefix).lstrip("/") for stat in backend.list(prefix)]


def test_the_layout_is_the_documents(runs: TrainingRuns, tmp_path: Path) -> None:
    rows = tmp_path / "bodies.jsonl"
    rows.write_text(runs.dataset.read_text().replace('"text"', '"body"'))
    runs.train(
        dataset=str(rows), dataset_text_field="body", num_epochs=1, gradient_accumulation=4, save_steps=2, eval_steps=3
    )
    found = [name for name in names(runs) if not name.startswith("logs/2")]
    steps = [2, 4, 5]  # 76 rows are 19 passes, the last 3 of which make a step by themselves
    marks = [f"checkpoints/step-{step:06}.json" for step in steps]
    if runs.framework == "nemo":
        files = [f"checkpoints/step-{step:06}.ckpt" for step in steps]
    else:
        files = [f"checkpoints/checkpoint-{step}/{name}" for step in steps for name in [*OF_HF, "rng_state.pth"]]
    assert sorted(found) == sorted(["config/run.json", "logs/.keep", *marks, *files])
    with runs.checkpoints() as checkpoints:
        read = [checkpoints.read_mark(step) for step in steps]
    assert [("eval_loss" in mark.metrics, "loss" in mark.metrics) for mark in read[1:]] == [
        (False, False),
        (True, True),
    ]
    assert all(mark.framework == runs.framework and mark.run_id == "run" for mark in read)


def test_a_killed_run_goes_on_to_the_same_end(runs: TrainingRuns) -> None:
    """In the middle of an epoch, on the rows that it would have seen."""
    sizes: dict[str, Any] = {"max_steps": 120, "save_steps": 8, "eval_steps": 120, "save_total_limit": 3}
    runs.train("whole", **sizes)
    killed = runs.start("killed", **sizes)
    runs.wait_for_step(24, killed, "killed")
    killed.signal(signal.SIGKILL)
    killed.wait()
    latest = runs.checkpoints("killed").latest()
    assert latest is not None
    assert 24 <= latest < 120
    resumed = runs.train("killed", resume=True, **sizes)
    assert f"resume_step={latest}" in resumed.text()
    assert_same_end(runs, 120, "whole", "killed")
    assert runs.checkpoints("killed").complete_steps() == [104, 112, 120]
    again = runs.train("killed", resume=True, **sizes)
    assert "resume_step=120" in again.text()
    assert runs.checkpoints("killed").latest() == 120
    more = {**sizes, "max_steps": 125}
    runs.train("killed", resume=True, **more)
    assert runs.checkpoints("killed").latest() == 125


def test_two_ranks_stop_together_and_go_on_to_the_same_end(
    framework: str, runs: TrainingRuns, tmp_path: Path, bucket: str
) -> None:
    """Though one alone was asked to; and each uploads what it wrote."""
    in_bucket = TrainingRuns(framework, tmp_path, f"s3://{bucket}/runs")
    env = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    sizes: dict[str, Any] = {"max_steps": 60, "save_steps": 5, "eval_steps": 60, "save_total_limit": 2, "env": env}
    in_bucket.train("whole", 2, **sizes)
    stopped = in_bucket.start("stopped", 2, **sizes)
    in_bucket.wait_for_step(10, stopped, "stopped")
    stopped.signal(signal.SIGTERM, first=1)
    assert stopped.wait() == [143, 143], stopped.text()
    latest = in_bucket.checkpoints("stopped").latest()
    assert latest is not None
    assert f"stopped after step {latest}" in stopped.text()
    in_bucket.train("stopped", 2, resume=True, **sizes)
    assert_same_end(in_bucket, 60, "whole", "stopped")
    if framework == "hf":
        files = {file.name for file in in_bucket.checkpoints("stopped").read_mark(60).files}
        assert files == {f"checkpoint-60/{name}" for name in [*OF_HF, "rng_state_0.pth", "rng_state_1.pth"]}
    more = {**sizes, "max_steps": 63}
    in_bucket.train("stopped", 1, resume=True, **more)  # with another number of ranks
    assert in_bucket.checkpoints("stopped").latest() == 63
    in_bucket.close()


@pytest.mark.cluster
def test_ranks_of_a_job_train_in_the_group_that_is_there(
    framework: str, runs: TrainingRuns, local_cluster: Any, tmp_path: Path
) -> None:
    """On two nodes; and when one is killed, both begin again from the highest complete step."""
    envs = {
        "FRAMEWORK": framework,
        "RUN_ID": "run",
        "CHECKPOINT_BASE_URI": f"file://{tmp_path}/runs",
        "DATASET_URI": str(runs.dataset),
        "MODEL_ID": TINY,
        "EXTRA_ARGS_JSON": '{"max_steps": 60, "batch_size": 4, "max_seq_len": 32, "save_steps": 5}',
        "ATTEMPT_ID": "one",
    }
    builder: Any = DLJobBuilder().node_num(2).device_per_node(1).device_type("CPU")
    job = builder.train("-m unified.training").nnodes(2).nproc_per_node(1).env(envs).end().build()
    cluster = local_cluster(nodes=2, devices=1)
    handle = cluster.submit(job, "training")
    eventually(lambda: (runs.checkpoints().latest() or 0) >= 10, timeout=100, message="no checkpoint was made")
    os.kill(next(iter(cluster.workers(handle).values())), signal.SIGKILL)
    assert handle.wait(timeout=100) == 0, "\n".join(handle.logs())
    mark = runs.checkpoints().read_mark(60)
    assert (mark.world_size, runs.checkpoints().latest()) == (2, 60)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_a_gpu_is_used_with_bf16(runs: TrainingRuns) -> None:
    trained = runs.train(max_steps=4, save_steps=0)
    assert "device=cuda:0 precision=bf16" in trained.text()
    assert runs.checkpoints().latest() == 4
