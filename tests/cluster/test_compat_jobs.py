"""Whole programs that import upstream's names alone, run by ``python -m unified.compat``: script, job and workers.

Those of the documents' jobs are run natively as well, with our import prefix. The code of documents 1 and 3 about life
inside a worker is that of `test_spec_documents`, with the documents' own prefix put back; the jobs of documents 1 and 2
are the blocks of `test_document_blocks`. The cluster's daemons know nothing of the aliases: its workers have them
because the job says so.
"""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from tests.cluster import test_spec_documents as documents
from tests.unit.compat import test_document_blocks as blocks
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

SCRIPT_OF_A_WORKER = """
import sys
from dlrover.python.unified.api.runtime.worker import current_worker
from dlrover.python.unified.common.config import JobConfig
import dtruntime
print("worker of", current_worker().job_info.name, "with", sys.argv[1:], JobConfig.__module__, dtruntime.__name__)
"""


TRAINER_OF_THE_GUIDE = """
from dlrover.python.unified.api.runtime.worker import current_worker

class xxx:
    def run(self):
        print("trainer with", current_worker().job_info.user_config.k1, "on", current_worker().actor_info.node)
"""

TRAIN_OF_FOUR_RANKS = """
import torch
import torch.distributed as dist
from dlrover.python.unified.api.runtime.worker import current_worker

def run():
    args = current_worker().job_info.user_config
    assert dict(args) == {"data_dir": "data/nanogpt/", "batch_size": 16}, args
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size() == 4
    print("trained by", current_worker().actor_info.rank, "of", args.data_dir)
"""

SAYS_ITS_ROLE = """
import os
from dlrover.python.unified.api.runtime.worker import current_worker

def run():
    worker = current_worker()
    print(worker.actor_info.role, worker.actor_info.rank, dict(worker.job_info.user_config or {}), end=" ")
    print(os.environ.get("DLROVER_LOG_LEVEL", "-"))
"""


def upstream(text: str) -> str:
    """The text as it stands in its document."""
    return text.replace("from unified.api", "from dlrover.python.unified.api")


UPSTREAM = "dlrover.python.unified"
Door = Literal["native", "compat"]
both_doors = pytest.mark.parametrize("door", ["native", "compat"])


def run(
    folder: Path, script: str, *, env: dict[str, str], door: Door = "compat", **modules: str
) -> subprocess.CompletedProcess[str]:
    """Run a program by ``python -m unified.compat``, or natively, modules beside it (dots in a name: folders)."""
    for name, text in {"program": script, **modules}.items():
        own = text.replace("dlrover.python.unified", "").replace("dlrover/python/unified", "")
        assert "unified" not in own.replace("examples.unified", "")
        path = folder / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text if door == "compat" else text.replace(UPSTREAM, "unified")))
    inherited = {name: value for name, value in os.environ.items() if name != "UNIFIED_COMPAT"}
    return subprocess.run(
        [sys.executable, *(["-m", "unified.compat"] if door == "compat" else []), "program.py"],
        cwd=folder,
        env={**inherited, "UNIFIED_PROGRESS": "plain", **env},
        capture_output=True,
        text=True,
        check=False,
    )


def job(nodes: int, devices: int, *workloads: str) -> str:
    return SUBMIT.format(nodes=nodes, devices=devices, workloads="\n".join(f"    {line}" for line in workloads))


def succeeded(done: subprocess.CompletedProcess[str], job_name: str = "") -> str:
    """What the workers printed. The job must have succeeded too: a document's script ignores its exit code."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"job {job_name}" in done.stderr.splitlines()[-1], done.stdout + done.stderr
    assert " finished after " in done.stderr.splitlines()[-1], done.stdout + done.stderr
    return done.stdout


@both_doors
def test_first_example_of_the_guide(local_cluster: Cluster, tmp_path: Path, door: Door) -> None:
    """Its `xxx` is a name like any other; its gap `...` is left out."""
    cluster = local_cluster(nodes=1, devices=4)
    done = run(
        tmp_path / "project",
        blocks.FIRST_EXAMPLE,
        env={"UNIFIED_MASTER": cluster.address},
        door=door,
        xxx=TRAINER_OF_THE_GUIDE,
    )
    assert succeeded(done) == "[TRAINER-0] trainer with v1 on node-1\n"


@both_doors
def test_single_role(local_cluster: Cluster, tmp_path: Path, door: Door) -> None:
    """`torch` and `args` are given; the document's own `args` is a dict, which has no `__dict__`."""
    cluster = local_cluster(nodes=2, devices=2)
    given = "import torch\nfrom argparse import Namespace\nargs = Namespace(data_dir='data/nanogpt/', batch_size=16)\n"
    done = run(
        tmp_path / "project",
        given + textwrap.dedent(blocks.SINGLE_ROLE),
        env={"UNIFIED_MASTER": cluster.address},
        door=door,
        **{"examples.unified.elastic.nanogpt.train": TRAIN_OF_FOUR_RANKS},
    )
    assert sorted(succeeded(done, "nanogpt").splitlines()) == [
        f"[ELASTIC-{rank}] trained by {rank} of data/nanogpt/" for rank in range(4)
    ]


@both_doors
def test_several_roles(local_cluster: Cluster, tmp_path: Path, door: Door) -> None:
    """The outline's names are given, and it ends before a submit."""
    cluster = local_cluster(nodes=2, devices=4)
    given = "from dlrover.python.unified.api.builder import DLJobBuilder\n"
    given += "worker_node_num, device_per_worker_node, log_level = 2, 4, 'INFO'\n"
    done = run(
        tmp_path / "project",
        given + textwrap.dedent(blocks.OUTLINE) + "job.submit()\n",
        env={"UNIFIED_MASTER": cluster.address},
        door=door,
        **{"module.a": SAYS_ITS_ROLE, "module.b": SAYS_ITS_ROLE, "entrypoint": SAYS_ITS_ROLE},
    )
    assert sorted(succeeded(done).splitlines()) == [
        "[a-0] a 0 {} INFO",
        "[a-1] a 1 {} INFO",
        "[b-0] b 0 {} INFO",
        "[role-0] role 0 {} INFO",
    ]


@both_doors
def test_reinforcement_learning_on_a_laptop(tmp_path: Path, door: Door) -> None:
    """It asks for 18 CPUs: a cluster of its own shares out those that there are."""
    given = "from omegaconf import DictConfig\nfrom dlrover.python.unified.api.builder import DLJobBuilder\n"
    done = run(
        tmp_path / "project",
        given + "args = {'lr': 0.5}\n" + textwrap.dedent(blocks.RL),
        env={"UNIFIED_HOME": str(tmp_path / "home"), "UNIFIED_MASTER": ""},
        door=door,
        **{f"module.{role}": SAYS_ITS_ROLE for role in ("trainer", "rollout", "reward")},
    )
    assert sorted(succeeded(done, "rl_job").splitlines()) == sorted(
        f"[{role}-{rank}] {role} {rank} {{'lr': 0.5}} -"
        for role, total in {"trainer": 2, "rollout": 4, "reward": 1}.items()
        for rank in range(total)
    )


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
    done = run(tmp_path / "project", given + textwrap.dedent(blocks.COMMAND), env=env)
    said = "worker of test_cmd_api with ['--test', '0'] unified.job.config unified.compat.dtruntime"
    assert said in succeeded(done, "test_cmd_api")


def test_a_job_as_json(local_cluster: Cluster, tmp_path: Path) -> None:
    """As ``python -m dlrover.python.unified.driver.main`` takes it, on a cluster that knows nothing of upstream."""
    from unified.api.builder import DLJobBuilder
    from unified.job import JobConfig

    cluster = local_cluster(nodes=1, devices=1)
    (tmp_path / "module.py").write_text(SAYS_ITS_ROLE + "    print(worker.actor_info.spec.config)\n")
    job = (
        DLJobBuilder().device_type("CPU").config({"lr": 0.5}).workload("a", ("module", "run")).config({"k": 1}).build()
    )
    config = JobConfig(job_name="from-json", dl_config=job)
    done = subprocess.run(
        [sys.executable, "-m", "unified.compat", "-m", "dlrover.python.unified.driver.main", config.model_dump_json()],
        cwd=tmp_path,
        env={**os.environ, "UNIFIED_PROGRESS": "plain", "UNIFIED_MASTER": cluster.address},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[a-0] a 0 {'lr': 0.5} -\n[a-0] {'k': 1}\n"), done.stderr
