"""Whole programs that import upstream's names alone, run by ``python -m unified.compat``: script, job and workers.

The code of documents 1 and 3 is that of `test_spec_documents`, with the documents' own import prefix put back. The
cluster's daemons know nothing of the aliases: its workers have them because the job says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import test_spec_documents as documents
from unified.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

Cluster = Callable[..., LocalCluster]

# Document 1: step 2 of "Instruction", with workloads in the place of its gap.
SUBMIT = """
from dlrover.python.unified.api.builder import DLJobBuilder

dl_job = (
    DLJobBuilder()
    .dl_type("SFT")
    .node_num({nodes})
    .device_per_node({devices})
    .device_type("CPU")
    .config({{"lr": 0.5}})
{workloads}
    .build())

if dl_job.submit() != 0:
    raise SystemExit("the job failed")
"""

# Document 2, "Single role(via CLI command)".
COMMAND = """
from dlrover.python.unified.api.builder import DLJobBuilder
# Conveniently convert a CLI command into a Ray job
cmd = f"dlrover-run --nnodes=1 --nproc_per_node=1 {Your_dlrover_root_dir}/dlrover/python/unified/tests/integration_test/dummy_run.py --test 0"
job = DLJobBuilder().by_dlrover_run_cmd(cmd).build()
job.submit("test_cmd_api", master_cpu=1, master_memory=128)
"""  # noqa: E501  # the document's line

SCRIPT_OF_A_WORKER = """
import sys
from dlrover.python.unified.api.runtime.worker import current_worker
from dlrover.python.unified.common.config import JobConfig
import dtruntime
print("worker of", current_worker().job_info.name, "with", sys.argv[1:], JobConfig.__module__, dtruntime.__name__)
"""


def upstream(text: str) -> str:
    """The text as it stands in its document."""
    return text.replace("from unified.api", "from dlrover.python.unified.api")


def run(folder: Path, script: str, *, env: dict[str, str], **modules: str) -> subprocess.CompletedProcess[str]:
    """Run a program by ``python -m unified.compat``, modules beside it."""
    folder.mkdir(exist_ok=True)
    for name, text in {"program": script, **modules}.items():
        assert "unified" not in text.replace("dlrover.python.unified", "").replace("dlrover/python/unified", "")
        (folder / f"{name}.py").write_text(text)
    inherited = {name: value for name, value in os.environ.items() if name != "UNIFIED_COMPAT"}
    return subprocess.run(
        [sys.executable, "-m", "unified.compat", "program.py"],
        cwd=folder,
        env={**inherited, "UNIFIED_PROGRESS": "plain", **env},
        capture_output=True,
        text=True,
        check=False,
    )


def job(nodes: int, devices: int, *workloads: str) -> str:
    return SUBMIT.format(nodes=nodes, devices=devices, workloads="\n".join(f"    {line}" for line in workloads))


def test_entry_points(local_cluster: Cluster, tmp_path: Path) -> None:
    cluster = local_cluster(nodes=2, devices=1)
    trained = "import torch.distributed as dist\ndef train(args): assert (args.lr, dist.get_world_size()) == (0.5, 2)\n"
    done = run(
        tmp_path / "project",
        job(
            *(2, 1, '.train("my_train.run").nnodes(2).nproc_per_node(1)'),
            '.workload("service", "my_service.TrainerService").resource(cpu=0.1)',
            '.workload("other", "my_other_service.TrainerService").resource(cpu=0.1)',
        ),
        env={"UNIFIED_MASTER": cluster.address},
        my_train=upstream(documents.FUNCTION_ENTRY) + documents.INFO + trained,
        my_service=upstream(documents.SERVICE_OF_THE_GUIDE) + documents.COUNT_TO_THREE,
        my_other_service=upstream(documents.SERVICE_OF_THE_REFERENCE) + documents.COUNT_TO_THREE,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_calls_between_roles(local_cluster: Cluster, tmp_path: Path) -> None:
    cluster = local_cluster(nodes=2, devices=1)
    done = run(
        tmp_path / "project",
        job(
            *(2, 1, '.workload("caller", "caller.run").resource(cpu=0.1)'),
            '.workload("actor", "provider.VLLMActor").resource(cpu=0.1).not_driver()',
            '.workload("learner", "provider.VLLMActor").total(2).resource(cpu=0.1).not_driver()',
        ),
        env={"UNIFIED_MASTER": cluster.address},
        remote_call=upstream(documents.INTERFACE),
        provider=upstream(documents.PROVIDER),
        caller=upstream(documents.CALLER),
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_queue_and_data_loader(local_cluster: Cluster, tmp_path: Path) -> None:
    cluster = local_cluster(nodes=1, devices=2)
    done = run(
        tmp_path / "project",
        job(
            *(1, 2, '.workload("owner", "owner.run").resource(cpu=0.1)'),
            '.workload("consumer", "consumer.run").resource(cpu=0.1).not_driver()',
            '.workload("trainer", "loading.run").resource(cpu=0.1)',
        ),
        env={"UNIFIED_MASTER": cluster.address},
        owner=upstream(documents.OWNER),
        consumer=upstream(documents.CONSUMER),
        loading=upstream(documents.LOADING),
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_command_line_of_another_launcher_on_a_cluster_of_its_own(tmp_path: Path) -> None:
    """The worker is a script, and has all aliases; without a master the job brings its own cluster."""
    script = tmp_path / "root/dlrover/python/unified/tests/integration_test/dummy_run.py"
    script.parent.mkdir(parents=True)
    script.write_text(SCRIPT_OF_A_WORKER)
    given = f"Your_dlrover_root_dir = {str(tmp_path / 'root')!r}\n"
    env = {"UNIFIED_HOME": str(tmp_path / "home"), "UNIFIED_MASTER": ""}
    done = run(tmp_path / "project", given + COMMAND, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    said = "worker of test_cmd_api with ['--test', '0'] unified.job.config unified.compat.dtruntime"
    assert said in done.stdout, done.stdout + done.stderr
