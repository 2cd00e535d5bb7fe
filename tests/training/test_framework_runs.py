"""What the hf and the nemo framework have in common: steps, checkpoints, and how a run goes on."""

import json
import os
import re
import signal
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.training_runs import TINY, TrainingRuns, write_rows
from tests.training.conftest import NEEDS, needs
from unified.api.builder import DLJobBuilder
from unified.client.reports import read_reports
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
    assert [("eval_loss" in mark.metrics, "loss" in mark.metrics) for mark in read[1:]] == [(False, True), (True, True)]
    assert all(mark.framework == runs.framework and mark.run_id == "run" for mark in read)


def test_a_short_last_step_has_the_gradient_of_a_whole_one(nemo: TrainingRuns, tmp_path: Path) -> None:
    dataset = str(write_rows(tmp_path / "few.jsonl", 12))
    states = []
    for passes in (3, 4):
        run_id = f"passes-{passes}"
        nemo.train(run_id, dataset=dataset, num_epochs=1, gradient_accumulation=passes, max_grad_norm=0)
        saved = torch.load(nemo.fetch(1, run_id)["step-000001.ckpt"], weights_only=True)
        states.append({name: each["exp_avg"] for name, each in saved["optimizer_states"][0]["state"].items()})
    torch.testing.assert_close(*states)


def test_the_order_of_hfs_rows_takes_little_memory() -> None:
    needs("hf")
    from unified.training.methods import RunTrainer

    trainer = object.__new__(RunTrainer)
    trainer.train_dataset = range(1_000_000)
    trainer.args = SimpleNamespace(train_sampling_strategy="random", seed=1, data_seed=None)
    tracemalloc.start()
    rows = iter(trainer._get_train_sampler())
    first = [next(rows) for _ in range(100)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(first)) == 100
    assert peak < 1_000_000


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


def environment_of(
    framework: str, runs: TrainingRuns, tmp_path: Path, arguments: Mapping[str, float]
) -> dict[str, str]:
    """Variables of a job of the training program, whose run `runs` reads."""
    return {
        "FRAMEWORK": framework,
        "RUN_ID": "run",
        "CHECKPOINT_BASE_URI": f"file://{tmp_path}/runs",
        "DATASET_URI": str(runs.dataset),
        "MODEL_ID": TINY,
        "EXTRA_ARGS_JSON": json.dumps(arguments),
        "ATTEMPT_ID": "one",
    }


@pytest.mark.processes
def test_ranks_of_a_job_train_in_the_group_that_is_there(
    framework: str, runs: TrainingRuns, local_cluster: Any, tmp_path: Path
) -> None:
    """On two nodes; and when one is killed, both begin again from the highest complete step."""
    arguments = {"max_steps": 60, "batch_size": 4, "max_seq_len": 32, "save_steps": 5}
    envs = environment_of(framework, runs, tmp_path, arguments)
    builder: Any = DLJobBuilder().node_num(2).device_per_node(1).device_type("CPU")
    job = builder.train("-m unified.training").nnodes(2).nproc_per_node(1).env(envs).end().build()
    cluster = local_cluster(nodes=2, devices=1)
    handle = cluster.submit(job, "training")
    eventually(lambda: (runs.checkpoints().latest() or 0) >= 10, timeout=100, message="no checkpoint was made")
    os.kill(next(iter(cluster.workers(handle).values())), signal.SIGKILL)
    assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())
    mark = runs.checkpoints().read_mark(60)
    assert (mark.world_size, runs.checkpoints().latest()) == (2, 60)


@pytest.mark.processes
@pytest.mark.parametrize("framework", ["meta", *NEEDS], indirect=True)
def test_each_step_is_a_point_with_its_own_loss_and_rate(
    framework: str, runs: TrainingRuns, local_cluster: Any, tmp_path: Path
) -> None:
    """With `logging_steps` of 1, however quick the steps are; read as the training API reads it."""
    arguments = {"max_steps": 6, "batch_size": 4, "max_seq_len": 32, "save_steps": 3, "logging_steps": 1, "lr": 1e-3}
    envs = environment_of(framework, runs, tmp_path, arguments)
    builder: Any = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU")
    job = builder.train("-m unified.training").nnodes(1).nproc_per_node(1).env(envs).end().build()
    cluster = local_cluster(nodes=1, devices=1)
    handle = cluster.submit(job, "training")
    assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())
    (worker,) = handle.status().workers
    points = {
        point.step: point.metrics for point in read_reports(cluster.connection, "training", worker.name, 0).reports
    }
    if framework == "hf":
        state = json.loads(runs.fetch(6)["checkpoint-6/trainer_state.json"].read_text())
        logged = {
            each["step"]: (each["loss"], each["learning_rate"]) for each in state["log_history"] if "loss" in each
        }
    else:
        lines = re.findall(r"step (\d)/6 .*?loss=(\S+) .*?lr=(\S+)", "\n".join(handle.logs()))
        logged = {int(step): (float(loss), float(lr)) for step, loss, lr in lines}
    assert list(points) == list(logged) == [1, 2, 3, 4, 5, 6]
    for step, (loss, lr) in logged.items():
        assert points[step]["loss"] == pytest.approx(loss, rel=1e-4)
        assert points[step]["lr"] == pytest.approx(lr, rel=1e-4)
        assert ("eval_loss" in points[step]) == (step in (3, 6))
    assert len({lr for _, lr in logged.values()}) == 6


HAS_GPU = torch.cuda.is_available()
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no NVIDIA GPU here")]


@pytest.mark.parametrize("framework", ["meta", *NEEDS], indirect=True)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=ON_GPU)])
def test_a_device_is_used_with_bf16(runs: TrainingRuns, device: str) -> None:
    """As the device has it, where that is a GPU."""
    asked: dict[str, Any] = {"env": {"CUDA_VISIBLE_DEVICES": ""}, "precision": "bf16"} if device == "cpu" else {}
    sizes: dict[str, Any] = {"save_steps": 2, "lr": 1e-3, **asked}
    trained = runs.train(max_steps=4, **sizes)
    assert re.search(rf"^unified-train: rank 0 of 1 on \S+, {device}$", trained.text(), re.MULTILINE), trained.text()
    assert re.search(
        r"^unified-train: run run .* ranks=1 precision=bf16 resume_step=None$", trained.text(), re.MULTILINE
    )
    assert runs.checkpoints().complete_steps() == [2, 4]
    metrics = runs.checkpoints().read_mark(4).metrics
    assert 0 < metrics["loss"] < 10
    assert 0 < metrics["eval_loss"] < 10
    runs.train(max_steps=6, resume=True, **sizes)
    assert runs.checkpoints().latest() == 6
