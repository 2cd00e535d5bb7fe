"""Scripts with the Trainers of transformers and Lightning, as a job and without one, with one line for reports."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster, Project, project  # noqa: F401 - fixtures
from tests.training.conftest import needs
from unified.api.builder import DLJobBuilder
from unified.client.reports import read_reports
from unified.protocol.records import WorkerReport

STEPS = 12
HF = f"""
import sys
import torch, transformers
from unified.integrations.transformers import TransformersCallback

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x, labels=None):
        return {{"loss": (self.linear(x) - labels).square().mean(), "logits": self.linear(x)}}

rows = [{{"x": torch.randn(4), "labels": torch.randn(1)}} for _ in range(64)]
arguments = transformers.TrainingArguments(
    sys.argv[1], max_steps={STEPS}, logging_steps=2, save_strategy="no", eval_strategy="steps", eval_steps=6,
    report_to="none", use_cpu=True, per_device_train_batch_size=2, learning_rate=0.01,
)
trainer = transformers.Trainer(Net(), arguments, train_dataset=rows, eval_dataset=rows[:8])
trainer.add_callback(TransformersCallback())
trainer.train()
print("trained", trainer.state.global_step, flush=True)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""
LIGHTNING = f"""
import os
import sys
import torch
import lightning.pytorch as lightning
from unified.integrations.lightning import LightningCallback

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        loss = self.linear(batch).square().mean()
        self.log("train_loss", loss)
        self.log("total", 1.0)  # the name of a parameter of `report`
        return loss

    def validation_step(self, batch, index):
        self.log("eval_loss", self.linear(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

rows = torch.utils.data.DataLoader(torch.randn(96, 4), batch_size=2)
devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
trainer = lightning.Trainer(
    accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", max_steps={STEPS},
    log_every_n_steps=2, val_check_interval=12, accumulate_grad_batches=2,
    limit_val_batches=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    default_root_dir=sys.argv[1], callbacks=[LightningCallback()],
)
trainer.fit(Net(), rows, rows)
print("trained", trainer.global_step, flush=True)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""
SCRIPTS = {"hf": HF, "nemo": LIGHTNING}
LOGGED = {"hf": {"loss", "learning_rate", "grad_norm"}, "nemo": {"loss", "learning_rate", "train_loss"}}
Read = Callable[[int], list[WorkerReport]]


@pytest.fixture(params=SCRIPTS)
def library(request: pytest.FixtureRequest) -> str:
    return needs(request.param)


@pytest.mark.processes
def test_every_rank_reports_steps_total_and_what_is_logged(
    library: str,
    local_cluster: Cluster,
    project: Project,  # noqa: F811
    tmp_path: Path,
) -> None:
    project(script_of_trainer=SCRIPTS[library])
    cluster = local_cluster(nodes=1, devices=2)
    command = f"torchrun --nproc-per-node=2 -m script_of_trainer {tmp_path / 'out'}"
    job = DLJobBuilder().device_per_node(2).device_type("CPU").by_dlrover_run_cmd(command).build()
    handle = cluster.submit(job, library)
    assert handle.wait(timeout=200) == 0
    for worker in handle.status().workers:
        if worker.role != "ELASTIC":
            continue
        reports = read_reports(cluster.connection, handle.job_id, worker.name, worker.incarnation).reports
        assert {report.total for report in reports} == {STEPS}
        assert sorted({report.step for report in reports if report.step}) == list(range(1, STEPS + 1))
        of_step = {step: [each for each in reports if each.step == step] for step in (2, STEPS)}
        for points in of_step.values():
            values = {name: value for point in points for name, value in point.metrics.items()}
            assert LOGGED[library] <= values.keys()
            assert all(isinstance(value, int | float) and math.isfinite(value) for value in values.values())
            assert "total" not in values
        assert any("eval_loss" in report.metrics for report in reports)


def test_outside_of_a_worker_a_script_trains_as_without_the_callback(library: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPTS[library])
    for launcher in ([sys.executable], [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]):
        env = {name: text for name, text in os.environ.items() if not name.startswith(("UNIFIED_", "PYTEST_"))}
        done = subprocess.run(
            [*launcher, str(tmp_path / "script.py"), str(tmp_path / "out")],
            env=env, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert f"trained {STEPS}" in done.stdout
