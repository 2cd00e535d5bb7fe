"""The Python code that the page shows to copy, run by a worker of a real job: the page then has what was missing."""

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Cluster, Project
from tests.support.page_snippets import snippets
from unified.api.builder import DLJob, DLJobBuilder
from unified.coordinator.client import RemoteCoordinator
from unified.protocol.coordinator import DescribeSpaces, SpaceList

pytestmark = pytest.mark.processes

WORKER = """
from unified import *
from unified.checkpoint import *
from unified.data import *

path, folder, step, loss, state = {path!r}, {folder!r}, 7, 0.5, {{"weights": [1.0, 2.0]}}

def train():
    for snippet in {code!r}:
        exec(snippet, globals())
"""


def job_of_snippets(folder: Path, project: Project) -> DLJob:
    code = [text for text in snippets() if not text.startswith(("unified ", "unified-agent ", "curl "))]
    assert code
    (folder / "samples.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    checkpoints = str(folder / "snippet-checkpoints")
    project(snippet_job=WORKER.format(path=str(folder / "samples.jsonl"), folder=checkpoints, code=code))
    builder: Any = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU")
    job: DLJob = builder.workload("w", "snippet_job.train").resource(cpu=0.1).build()
    return job


def test_each_piece_of_code_does_what_the_page_says(local_cluster: Cluster, project: Project, tmp_path: Path) -> None:
    job = job_of_snippets(tmp_path, project)
    cluster = local_cluster(nodes=1, devices=1)
    handle = cluster.submit(job, "snippets")
    assert handle.wait(timeout=200) == 0, handle.status().reason
    [worker] = handle.status().workers
    assert worker.progress is not None
    assert (worker.progress.step, worker.progress.metrics) == (7, {"loss": 0.5})
    with RemoteCoordinator(cluster.address) as remote:
        [space] = remote.ask(DescribeSpaces(space=handle.job_id), SpaceList).spaces
    assert [(each.total_samples, each.format) for each in space.datasets] == [(2, "jsonl")]
    assert [each.step for each in space.checkpoints] == [7]
