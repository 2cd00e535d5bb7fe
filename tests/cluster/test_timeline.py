"""A training with a rank that is killed, a hang and a checkpoint: its timeline, and where its time went."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Cluster, Project
from tests.unit.client.test_timeline import check_nesting, lanes
from unified.api.builder import DLJobBuilder
from unified.client.reports import read_spans
from unified.protocol.records import Phase

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TRAINING = """
import os, signal, time
import torch, torch.distributed as dist
from pathlib import Path
from unified import RoleGroup, current_worker, rpc
from unified.checkpoint import CheckpointManager

class Scorer:
    @rpc()
    def score(self, step):
        if step == 5:
            raise ValueError("five")
        return step * 2

def train():
    worker, folder = current_worker(), Path({folder!r})
    rank = worker.actor_info.rank
    begin = 3 if worker.incarnation else 0
    with CheckpointManager(folder / f"of-{{rank}}") as manager:
        for step in range(begin, 9):
            if worker.incarnation == 0 and step == 6 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if worker.incarnation == 1 and step == 7 and rank == 0:
                time.sleep(600)
            dist.all_reduce(torch.ones(1))
            if rank == 0:
                try:
                    RoleGroup("scorer").call("score", step).result()
                except ValueError:
                    pass
                if step == 2 and not begin:
                    manager.save_bytes(b"state", step)
            worker.report(step=step + 1, total=9, loss=1 / (step + 1))
            time.sleep(0.3)
"""


def test_the_timeline_and_the_phases_of_a_training_with_faults(
    local_cluster: Cluster, project: Project, tmp_path: Path
) -> None:
    project(faulty=TRAINING.format(folder=str(tmp_path)))
    builder: Any = (
        DLJobBuilder().node_num(1).device_per_node(2).device_type("CPU").global_env({"UNIFIED_TRACE": "calls"})
    )
    builder = builder.role("trainer").train("faulty.train").total(2).per_group(2)
    builder = builder.workload("scorer", "faulty.Scorer").resource(cpu=0.1).not_driver()
    cluster = local_cluster(nodes=1, devices=2)
    handle = cluster.submit(builder.build(), "faulty", hang_timeout=4, stop_grace_s=1)
    assert handle.wait(timeout=200) == 0, handle.status().end
    status = handle.status()

    assert status.times is not None
    assert status.ended_at is not None
    spent = status.times.at(status.ended_at)
    assert sum(spent.values()) == pytest.approx(status.ended_at - status.submitted_at, rel=0.01)
    assert {
        Phase.STARTING,
        Phase.PRODUCTIVE,
        Phase.REDONE,
        Phase.RECOVERING,
        Phase.STALLED,
        Phase.STOPPING,
    } <= spent.keys()
    assert spent["stalled"] >= 3.5, "a hang counts from its last progress"

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "unified", *words, "--master", cluster.address]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout

    assert " productive, " in next(line for line in run("status", "faulty").splitlines() if line.startswith("  time ["))
    file = tmp_path / "trace.json"
    assert "ui.perfetto.dev" in run("timeline", "faulty", "-o", str(file))
    trace = json.loads(file.read_text())
    check_nesting(trace)
    slices, instants = lanes(trace), lanes(trace, "i")
    assert [name for name, *_ in slices["job/stages"]][:4] == [status.job_id, "waiting", "starting", "running"]
    assert slices["job/stages"][0][2] == pytest.approx(sum(spent.values()), rel=0.01)
    assert [name for name, *_ in slices["job/rounds of trainer"]] == ["round 1", "round 2", "round 3"]
    ranks = [worker.name for worker in status.workers if worker.role == "trainer"]
    node = f"node {status.workers[0].node}"
    for rank in ranks:
        assert [name for name, *_ in slices[f"{node}/{rank}"]] == ["incarnation 0", "incarnation 1", "incarnation 2"]
    failures = [name for name, *_ in instants["job/failures"]]
    assert failures.count("worker-failed") >= 2
    assert {"hang-suspected", "hang-diagnosed"} <= set(failures)
    assert "checkpoint-complete" in [name for name, *_ in instants["job/checkpoints"]]

    calls = [each for lane, found in slices.items() if lane.startswith(f"{node}/{ranks[0]} calls") for each in found]
    scorer = next(worker.name for worker in status.workers if worker.role == "scorer")
    handled = [each for lane, found in slices.items() if lane.startswith(f"{node}/{scorer} handles") for each in found]
    assert {name for name, *_ in (*calls, *handled)} == {"score"}
    spans = [
        span
        for incarnation in range(3)
        for span in read_spans(cluster.connection, status.job_id, ranks[0], incarnation, limit=100)
    ]
    assert len(spans) == len(calls) == len(handled)
    assert {span.peer for span in spans} == {scorer}
    assert {span.error for span in spans} == {"", "ValueError: five"}
