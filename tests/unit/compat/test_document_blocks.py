"""Blocks of documents 1 and 2, and what 3 and 5 list: with our import prefix, and under the aliases as they stand.

Blocks are kept as text and executed. A gap that a document leaves to its reader (`...`, `xxx`) is filled or left out;
two lines that cannot run are replaced, and fail in tests of their own. Comments say which; docs/compat.md has the list.
"""

import importlib
import inspect
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import pytest

from unified import compat
from unified.api.builder import DLJob, DLJobBuilder
from unified.errors import JobError
from unified.job import JobConfig
from unified.job.options import submit_options
from unified.protocol import coordinator

UPSTREAM = "dlrover.python.unified"
Execute = Callable[..., dict[str, Any]]


@pytest.fixture(params=["native", "compat"])
def prefix(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of imports."""
    if request.param == "native":
        yield "unified"
    else:
        compat.install()
        yield UPSTREAM
        compat.uninstall()


@pytest.fixture
def execute(prefix: str) -> Execute:
    """Runs a block, and gives the names that it leaves behind."""

    def run(block: str, **names: Any) -> dict[str, Any]:
        exec(compile(textwrap.dedent(block).replace(UPSTREAM, prefix), "block", "exec"), names)
        return names

    return run


# Document 1, "Instruction", step 2, less its gap `...`.
FIRST_EXAMPLE = """
    from dlrover.python.unified.api.builder import DLJobBuilder

    dl_job = (
        DLJobBuilder()
        .dl_type("SFT")
        .node_num(1)
        .device_per_node(4)
        .config({"k1": "v1"})
        .trainer("xxx", "xxx")
        .build())

    dl_job.submit()
"""

# Document 1, "Job Submitting Basic API": a name, and the blocks "Build" and "Submit", whose gap `...` is filled.
NAME = "dlrover.python.unified.api.builder::DLJobBuilder"
BUILD = """
    dl_job = (
        DLJobBuilder()
        .workload("a", ("module", "run"))
        .build())
"""
SUBMIT = """
    dl_job.submit()
"""

# Document 2, "Single role", less its line for `args`: that is a dict, which has no `__dict__`. One is given.
ARGS = 'args = {"data_dir": "data/nanogpt/", "batch_size": 16}\n'
SINGLE_ROLE = """
    from omegaconf import DictConfig
    from dlrover.python.unified.api.builder import DLJobBuilder
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
    job.submit(job_name="nanogpt")
"""

# Document 2, "Single role(via CLI command)".
COMMAND = """
    from dlrover.python.unified.api.builder import DLJobBuilder
    # Conveniently convert a CLI command into a Ray job
    cmd = f"dlrover-run --nnodes=1 --nproc_per_node=1 {Your_dlrover_root_dir}/dlrover/python/unified/tests/integration_test/dummy_run.py --test 0"
    job = DLJobBuilder().by_dlrover_run_cmd(cmd).build()
    job.submit("test_cmd_api", master_cpu=1, master_memory=128)
"""  # noqa: E501  # the document's line

# Document 2, "Multiple roles(outline)". Each gap `xxx` is filled, each `...` left out; its "entrypoint" is no entry
# point, and has a function here.
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
    .workload("role","entrypoint.run") # any workloads in another way
    .build()
    )
"""

# Document 2, "Use RL as a example".
RL = """
    job = (
    DLJobBuilder()
    .config(DictConfig(args))
    .role("trainer").train("module.trainer.run").total(2).resource(gpu=1).end()
    .role("rollout").run("module.rollout.run").total(4).resource(cpu=4).end()
    .workload("reward", "module.reward.run").total(1).resource(cpu=2).end()
    .build()
    )
    job.submit(job_name="rl_job")
"""

# Document 2, isolated scheduling; the job is not said there.
ISOLATION = """
    job.submit(
        master_isolation_schedule_resource="MASTER_RESOURCE",
        worker_isolation_schedule_resource="WORKER_RESOURCE",
    )
"""

# Document 3, "DataQueue", its "Interface sketch".
QUEUE = """
    class DataQueue(Generic[T]):
        \"\"\"
        Distributed data queue interface.
        \"\"\"

        def __init__(self, name: str, is_master: bool = False, size: int = 1000): ...

        def qsize(self) -> int: ...

        def put(self, *obj: T) -> None: ...

        def put_async(self, *obj: T) -> Future[None]: ...

        def get(self, batch_size: int) -> List[T]: ...

        def get_nowait(self, max_size: int = 1) -> List[T]: ...
"""
IMPORT = "from dlrover.python.unified.api.builder import DLJobBuilder\n"


class Torch:
    """Of torch, what the document's block asks for, on a host without an accelerator."""

    class cuda:  # torch's own name
        @staticmethod
        def is_available() -> bool:
            return False


Submitted = list[tuple[DLJob, JobConfig]]


@pytest.fixture(autouse=True)
def submitted(monkeypatch: pytest.MonkeyPatch) -> Submitted:
    """Jobs that came to the cluster's door, with their options. Past it: tests/cluster/test_spec_documents.py."""
    jobs: Submitted = []

    def submit(job: DLJob, job_name: str | None = None, /, **options: Any) -> int:
        jobs.append((job, submit_options(job, {**({"job_name": job_name} if job_name else {}), **options}, {})))
        return 0

    monkeypatch.setattr(DLJob, "submit", submit)
    return jobs


def test_first_example_of_the_guide(execute: Execute, submitted: Submitted) -> None:
    execute(FIRST_EXAMPLE)
    job, _ = submitted[0]
    assert (job.node_num, job.device_per_node, job.dl_type, job.config.k1) == (1, 4, "SFT", "v1")
    assert job.get_workload("TRAINER").entry_point == "xxx.xxx"


def test_build_and_submit(execute: Execute, submitted: Submitted) -> None:
    execute(IMPORT + textwrap.dedent(BUILD) + textwrap.dedent(SUBMIT))
    job, config = submitted[0]
    assert job.get_workload("a").entry_point == "module.run"
    assert config.job_name.startswith("unified-")


def test_name_of_the_builder(prefix: str) -> None:
    module, _, name = NAME.replace(UPSTREAM, prefix).partition("::")
    assert getattr(importlib.import_module(module), name) is DLJobBuilder


def test_isolated_scheduling(execute: Execute, submitted: Submitted) -> None:
    execute(ISOLATION, job=DLJobBuilder().workload("a", "m.f").build())
    _, config = submitted[0]
    assert config.master_isolation_schedule_resource == "MASTER_RESOURCE"
    assert config.worker_isolation_schedule_resource == "WORKER_RESOURCE"


def test_single_role(execute: Execute, submitted: Submitted) -> None:
    execute(SINGLE_ROLE, args=Namespace(data_dir="data/nanogpt/", batch_size=16), torch=Torch())
    job, config = submitted[0]
    workload = job.get_workload("ELASTIC")
    assert (config.job_name, workload.total, workload.per_group, job.device_type) == ("nanogpt", 4, 2, "CPU")
    assert dict(job.config) == {"data_dir": "data/nanogpt/", "batch_size": 16}


def test_single_role_with_the_documents_own_arguments_fails_before_the_builder_has_them(execute: Execute) -> None:
    with pytest.raises(AttributeError, match="'dict' object has no attribute '__dict__'"):
        execute(ARGS + textwrap.dedent(SINGLE_ROLE), torch=Torch())


def test_single_role_by_a_command_line(execute: Execute, submitted: Submitted) -> None:
    execute(COMMAND, Your_dlrover_root_dir="/srv")
    job, config = submitted[0]
    entry_point = job.get_workload("ELASTIC").entry_point
    root = "/srv/dlrover/python/unified/tests/integration_test"
    assert (config.job_name, entry_point) == ("test_cmd_api", f"{root}/dummy_run.py --test 0")
    assert (config.master_cpu, config.master_mem) == (1, 128)
    assert (job.get_workload("ELASTIC").total, job.get_workload("ELASTIC").per_group) == (1, 1)


def test_outline_of_several_roles(execute: Execute) -> None:
    names = execute(IMPORT + textwrap.dedent(OUTLINE), worker_node_num=2, device_per_worker_node=4, log_level="INFO")
    job: DLJob = names["job"]
    assert {role: workload.total for role, workload in job.workloads.items()} == {"a": 2, "b": 1, "role": 1}
    assert job.env == {"DLROVER_LOG_LEVEL": "INFO"}


def test_outline_with_the_documents_own_entry_point_is_refused_by_name(execute: Execute) -> None:
    block = IMPORT + textwrap.dedent(OUTLINE).replace("entrypoint.run", "entrypoint")
    with pytest.raises(JobError, match="entry point 'entrypoint' is not valid"):
        execute(block, worker_node_num=2, device_per_worker_node=4, log_level="INFO")


def test_reinforcement_learning(execute: Execute, submitted: Submitted) -> None:
    from omegaconf import DictConfig

    execute(IMPORT + textwrap.dedent(RL), DictConfig=DictConfig, args={})
    job, config = submitted[0]
    assert config.job_name == "rl_job"
    found = {role: workload.total for role, workload in job.workloads.items()}
    assert found == {"trainer": 2, "rollout": 4, "reward": 1}
    assert job.get_workload("trainer").resource.accelerator == 1
    assert job.get_workload("rollout").resource.cpu == 4


def test_queue_is_called_as_document_3_sketches_it(execute: Execute, prefix: str) -> None:
    gaps = {"Generic": Generic, "T": TypeVar("T"), "Future": Future, "List": list}
    ours = importlib.import_module(f"{prefix}.api.runtime.queue").DataQueue
    sketch = execute(QUEUE, **gaps)["DataQueue"]
    methods = {name: thing for name, thing in vars(sketch).items() if inspect.isfunction(thing)}
    assert len(methods) == 6
    for name, method in methods.items():
        has = inspect.signature(getattr(ours, name)).parameters
        for parameter in inspect.signature(method).parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                assert any(own.kind is own.VAR_POSITIONAL for own in has.values()), name
            else:
                own = has[parameter.name]
                assert own.kind == parameter.kind
                assert parameter.default in (parameter.empty, own.default)


@pytest.mark.parametrize(
    "name",
    [
        *("rpc", "RoleGroup", "RoleActor", "UserRpcProxy", "create_rpc_proxy"),
        *("export_rpc_method", "export_rpc_instance", "FutureSequence"),
    ],
)
def test_exports_that_document_3_lists(prefix: str, name: str) -> None:
    assert callable(getattr(importlib.import_module(f"{prefix}.api.runtime"), name))


def test_class_that_document_2_names_for_all_options(prefix: str) -> None:
    """`dlrover.python.unified.common.config.JobConfig`."""
    home = "unified.job" if prefix == "unified" else f"{prefix}.common.config"
    assert importlib.import_module(home).JobConfig is JobConfig


def test_config_said_after_a_role_is_warned_of_where_upstream_gives_it_to_the_job(
    prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    DLJobBuilder().workload("a", "m.f").config({"k": 1}).build()
    assert ("is that of role a alone" in caplog.text) == (prefix == UPSTREAM)
    caplog.clear()
    DLJobBuilder().config({"lr": 1}).workload("a", "m.f").config({"k": 1}).build()
    assert not caplog.text


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
@pytest.mark.parametrize("of_variable", ["DLROVER_UNIFIED_", "UNIFIED_"])
def test_every_environment_variable_of_the_table_sets_its_option(of_variable: str, suffix: str) -> None:
    field, value = VARIABLES[suffix]
    job = DLJobBuilder().trainer("m", "c").build()
    assert getattr(submit_options(job, {}, {f"{of_variable}{suffix}": str(value)}), field) == value


# Document 5, "gRPC Protocol": the calls of its service, and the messages that it shows, which are records here.
CALLS = """
    RegisterWorker Heartbeat RegisterDataset GetDataShard WaitBarrier NotifyCheckpoint GetLatestCheckpoint"""
MESSAGES = {
    "RegisterWorker": "worker_id hostname port gpu_count memory_bytes metadata",  # there: WorkerInfo
    "RegisterDataset": "dataset_id path format total_samples shard_size shuffle seed metadata",  # there: DatasetInfo
    "ShardAssignment": "shard_id file_paths start_sample end_sample",
}


@pytest.mark.parametrize("call", CALLS.split())
def test_calls_of_the_coordinator_of_document_5(call: str) -> None:
    assert issubclass(getattr(coordinator, call), coordinator.CoordinatorRequest)


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_of_document_5_have_its_fields(message: str) -> None:
    assert {*MESSAGES[message].split()} <= {*getattr(coordinator, message).__struct_fields__}
