"""The code of the reference documents about describing a job, as it stands there but for the import prefix.

A block is kept as text and executed. Where a document leaves a gap (`xxx`, `…`, a name of the reader's own), the gap
is filled; what cannot run is replaced. A comment says so, docs/compat.md has the list, and nothing else is changed.
"""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from unified.api.builder import DLJob
from unified.job.options import submit_options


def execute(block: str, **names: Any) -> dict[str, Any]:
    """The names that a block leaves behind; later blocks of the documents rely on the import of the first ones."""
    code = "from unified.api.builder import DLJobBuilder\n" + textwrap.dedent(block)
    exec(compile(code, "block", "exec"), names)
    return names


# Document 1, "Instruction", step 2. The gap `...` is left out.
FIRST_EXAMPLE = """
    from unified.api.builder import DLJobBuilder

    dl_job = (
        DLJobBuilder()
        .dl_type("SFT")
        .node_num(1)
        .device_per_node(4)
        .config({"k1": "v1"})
        .trainer("xxx", "xxx")
        .build())
"""

# Document 2, "Single role", less its line for `args`: that is a dict, and `args.__dict__` wants a Namespace, so it is
# made one here; torch is not at hand on every machine that describes a job, so the device type it asks for is given.
SINGLE_ROLE = """
    from omegaconf import DictConfig
    from unified.api.builder import DLJobBuilder
    job = (
        DLJobBuilder()
        .config(DictConfig(args.__dict__))
        .node_num(2)
        .device_per_node(2)
        .device_type("GPU" if torch.cuda.is_available() else "CPU")
        .train("examples.unified.elastic.nanogpt.train.run")
        .nnodes(2)
        .nproc_per_node(2)
        .end() #optional, for type hinting
        .build()
    )
"""

# Document 2, "Single role(via CLI command)", without its submit, which tests/cluster runs.
COMMAND = """
    from unified.api.builder import DLJobBuilder
    # Conveniently convert a CLI command into a Ray job
    cmd = f"dlrover-run --nnodes=1 --nproc_per_node=1 {root}/dlrover/python/unified/tests/dummy_run.py --test 0"
    job = DLJobBuilder().by_dlrover_run_cmd(cmd).build()
"""

# Document 2, "Multiple roles(outline)". Each gap `xxx` is filled, each `...` left out; its "entrypoint" is no entry
# point, and is a dotted name here.
OUTLINE = """
    job = (
        DLJobBuilder()
        .node_num(worker_node_num) # total machine number
        .device_per_node(device_per_worker_node) # device number per machine
        .device_type("GPU") # device type
        .config({}) # global training variables setting
        .global_env({"DLROVER_LOG_LEVEL": log_level}) # global environment variables setting
        .role("a").run("module.a.run") # any workloads
        .resource(cpu=1) # resource unit for this role group
        .total(2) # total workloads number for this role group
        .role("b").run("module.b.run") # any workloads
        .workload("role","entry.point") # any workloads in another way
        .build()
    )
"""

# Document 2, "Use RL as a example". The document does not say how large its cluster is: one node of 8 devices.
RL = """
    job = (
        DLJobBuilder()
        .config(DictConfig(args))
        .role("trainer").train("module.trainer.run").total(2).resource(gpu=1).end()
        .role("rollout").run("module.rollout.run").total(4).resource(cpu=4).end()
        .workload("reward", "module.reward.run").total(1).resource(cpu=2).end()
        .build()
    )
"""


class Nothing:
    """Answers any chain of attributes and calls with False: stands for torch without CUDA."""

    def __getattr__(self, name: str) -> Nothing:
        return self

    def __call__(self) -> bool:
        return False


def test_first_example_of_the_guide_describes_a_trainer() -> None:
    job: DLJob = execute(FIRST_EXAMPLE)["dl_job"]
    assert (job.node_num, job.device_per_node, job.dl_type) == (1, 4, "SFT")
    assert job.config.k1 == "v1"
    assert list(job.workloads) == ["TRAINER"]
    assert job.get_workload("TRAINER").entry_point == "xxx.xxx"


def test_single_role_of_two_nodes_with_two_workers_each() -> None:
    from argparse import Namespace

    names = {"args": Namespace(data_dir="data/nanogpt/", batch_size=16), "torch": Nothing()}
    job: DLJob = execute(SINGLE_ROLE, **names)["job"]
    workload = job.get_workload("ELASTIC")
    assert (workload.backend, workload.total, workload.per_group) == ("elastic", 4, 2)
    assert (job.device_type, job.config.batch_size) == ("CPU", 16)


def test_role_by_a_command_line() -> None:
    job: DLJob = execute(COMMAND, root="/srv")["job"]
    workload = job.get_workload("ELASTIC")
    assert (workload.total, workload.per_group) == (1, 1)
    assert workload.entry_point == "/srv/dlrover/python/unified/tests/dummy_run.py --test 0"


def test_outline_of_several_roles() -> None:
    job: DLJob = execute(OUTLINE, worker_node_num=2, device_per_worker_node=4, log_level="INFO")["job"]
    assert {role: workload.total for role, workload in job.workloads.items()} == {"a": 2, "b": 1, "role": 1}
    assert job.env == {"DLROVER_LOG_LEVEL": "INFO"}


def test_reinforcement_learning_in_three_roles() -> None:
    from omegaconf import DictConfig

    job: DLJob = execute(RL, DictConfig=DictConfig, args={})["job"]
    assert {role: workload.total for role, workload in job.workloads.items()} == {
        "trainer": 2,
        "rollout": 4,
        "reward": 1,
    }
    assert job.get_workload("trainer").resource.accelerator == 1
    assert job.get_workload("rollout").resource.cpu == 4


# Document 2, the table of environment variables: the suffix, and a value to set.
VARIABLES = {
    "JOB_NAME": ("job_name", "mine"),
    "MASTER_CPU": ("master_cpu", 3.0),
    "MASTER_MEM": ("master_mem", 128),
    "MASTER_CREATE_TIMEOUT": ("master_create_timeout", 60.0),
    "NODE_MAX_RESTART": ("node_max_restart", 1),
    "JOB_MAX_RESTART": ("job_max_restart", 2),
    "MASTER_MAX_RESTART": ("master_max_restart", 3),
    "MASTER_ISOLATION_SCHEDULE_RESOURCE": ("master_isolation_schedule_resource", "MASTER_RESOURCE"),
    "WORKER_ISOLATION_SCHEDULE_RESOURCE": ("worker_isolation_schedule_resource", "WORKER_RESOURCE"),
}


@pytest.mark.parametrize("suffix", VARIABLES)
@pytest.mark.parametrize("prefix", ["DLROVER_UNIFIED_", "UNIFIED_"])
def test_every_environment_variable_of_the_table_sets_its_option(prefix: str, suffix: str) -> None:
    field, value = VARIABLES[suffix]
    job = execute(FIRST_EXAMPLE)["dl_job"]
    assert getattr(submit_options(job, {}, {f"{prefix}{suffix}": str(value)}), field) == value


def test_options_of_the_table_as_keywords() -> None:
    """As in `job.submit("test_cmd_api", master_cpu=1, master_memory=128)`."""
    job = execute(FIRST_EXAMPLE)["dl_job"]
    config = submit_options(job, {"job_name": "test_cmd_api", "master_cpu": 1, "master_memory": 128}, {})
    assert (config.job_name, config.master_cpu, config.master_mem) == ("test_cmd_api", 1, 128)
