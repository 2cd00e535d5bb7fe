"""The training program as an elastic role of a real job: layout in a bucket, stop and resume, a killed rank."""

import os
import shlex
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.conftest import Cluster
from tests.support import training
from tests.support.s3 import S3Server
from tests.support.training import complete_steps, keys, losses, options
from unified.api.builder import DLJobBuilder
from unified.client.handle import JobHandle
from unified.protocol.records import Progress
from unified.storage import open_storage
from unified.testing import LocalCluster, eventually

pytestmark = pytest.mark.processes
STEPS, SAVED = 160, 40
Start = Callable[..., JobHandle]


@pytest.fixture
def bucket(s3_environment: S3Server) -> str:
    """A bucket with a dataset of a few hundred rows."""
    name = s3_environment.make_bucket()
    backend, _ = open_storage(f"s3://{name}")
    with backend:
        backend.write("data/rows.jsonl", training.rows())
    return name


def submit(
    cluster: LocalCluster, bucket: str, name: str, *flags: str, ranks: int = 2, attempt: str = "", **extra_args: Any
) -> JobHandle:
    argv = options(
        f"s3://{bucket}/runs",
        f"s3://{bucket}/data/rows.jsonl",
        **{"max_steps": STEPS, "save_steps": SAVED, **extra_args},
    )
    builder = DLJobBuilder().node_num(1).device_per_node(2).device_type("CPU").skip_node_check()
    role = builder.role("trainer").train(f"-m unified.training {shlex.join([*argv, *flags])}")
    role.total(ranks).per_group(ranks).env({"ATTEMPT_ID": attempt or name})
    return cluster.submit(builder.build(), name, failover_exec_strategy=2, stop_grace_s=30)


def output(handle: JobHandle) -> str:
    """Lines of rank 0 of all its incarnations."""
    return "\n".join(line.partition("] ")[2] for line in handle.logs(rank=0))


def progress(handle: JobHandle) -> list[Progress]:
    """Progress of the ranks that report steps; of the others the number of their collectives alone is known."""
    found = [worker.progress for worker in handle.status().workers]
    return [each for each in found if each is not None and each.step is not None]


def await_step(handle: JobHandle, step: int) -> None:
    eventually(
        lambda: any((each.step or 0) >= step for each in progress(handle)),
        timeout=100,
        message=f"the run did not come to step {step}",
    )


@pytest.mark.slow
def test_the_layout_and_a_run_that_is_stopped_resumed_and_killed(local_cluster: Cluster, bucket: str) -> None:
    cluster = local_cluster(nodes=1, devices=2)
    base = f"s3://{bucket}/runs"
    whole = submit(cluster, bucket, "whole", run_id="whole")
    assert whole.wait(timeout=200) == 0, output(whole)
    steps = [f"checkpoints/step-{step:06}.{kind}" for step in range(SAVED, STEPS + 1, SAVED) for kind in ("json", "pt")]
    assert keys(base, "whole") == [*steps, "config/run.json", "logs/.keep"]
    (told,) = progress(whole)
    assert (told.step, told.total) == (STEPS, STEPS)
    assert {"loss", "lr", "tokens_per_s", "eval_loss"} <= told.metrics.keys()

    first = submit(cluster, bucket, "first", logging_steps=1)
    await_step(first, 12)
    first.stop()
    first.wait(timeout=200)
    stopped_at = complete_steps(base)[-1]
    assert 12 <= stopped_at < STEPS
    assert output(first).splitlines()[-1] == f"unified-train: stopped after step {stopped_at}"

    refused = submit(cluster, bucket, "refused")
    assert refused.wait(timeout=200) != 0
    assert f"already has checkpoints up to step {stopped_at}" in refused.status().reason
    assert all(worker.incarnation == 0 for worker in refused.status().workers)

    second = submit(cluster, bucket, "second", "--resume")
    await_step(second, stopped_at + 3)
    os.kill(next(iter(cluster.workers(second).values())), signal.SIGKILL)
    assert second.wait(timeout=200) == 0, output(second)
    assert complete_steps(base)[-1] == STEPS
    found, wanted = losses(output(second)), losses(output(whole))
    assert max(found) == STEPS
    assert found[STEPS] == pytest.approx(wanted[STEPS], rel=0.05)

    alone = submit(cluster, bucket, "alone", "--resume", ranks=1, max_steps=STEPS + 10)
    assert alone.wait(timeout=200) == 0, output(alone)
    assert complete_steps(base)[-1] == STEPS + 10
    assert min(losses(output(alone))) == STEPS + 1


@pytest.mark.slow
def test_bad_rows_end_the_job_with_one_line(local_cluster: Cluster, bucket: str) -> None:
    cluster = local_cluster(nodes=1, devices=2)
    handle = submit(cluster, bucket, "bad", dataset_text_field="body")
    assert handle.wait(timeout=200) != 0
    reason = f"line 1 of s3://{bucket}/data/rows.jsonl has no field 'body'; its fields: 'text'. "
    assert reason in handle.status().reason
    failed = [worker for worker in handle.status().workers if worker.reason]
    assert {worker.incarnation for worker in failed} == {0}
    lines = output(handle).splitlines()
    assert lines[-1].startswith(f"unified: {reason}")
    assert "Traceback" not in output(handle)
