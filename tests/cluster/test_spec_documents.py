"""Whole programs of the reference documents: script, job and workers, on a real cluster.

Blocks are kept as text. Names that a document leaves to its reader (`train`, `done`, `step`, `actor_forward`, …) are
defined around them, bodies that are `...` there are filled, and nothing else in them is changed. The code of documents
1 and 3 about what a worker sees is here; the jobs of documents 1 and 2 are the blocks of `test_document_blocks`.

Each runs by ``python -m unified.compat``, with upstream's names alone, and natively, with our import prefix. The
cluster's daemons know nothing of the aliases: its workers have them because the job says so.
"""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster, Project
from tests.unit.compat import test_document_blocks as blocks
from unified.api.builder import DLJobBuilder
from unified.job import JobConfig
from unified.testing import LocalCluster

pytestmark = [pytest.mark.processes, pytest.mark.slow]

Run = Callable[..., subprocess.CompletedProcess[str]]

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

# Documents 1 ("Function entrypoint example") and 3 ("Function entrypoint").
FUNCTION_ENTRY = """
from dlrover.python.unified.api.runtime.worker import current_worker

def run():
    args = current_worker().job_info.user_config
    # prepare data, model, optimizer using args
    train(args)
"""

# Document 1, "Class entrypoint example with RPC exposure".
SERVICE_OF_THE_GUIDE = """
from dlrover.python.unified.api.runtime import rpc
from dlrover.python.unified.api.runtime.worker import current_worker

class TrainerService:
    def __init__(self):
        self.state = {}

    @rpc(export=True)
    def get_status(self):
        return self.state

    def run(self):
        args = current_worker().job_info.user_config
        # main training loop
        while not done():
            step()
"""

# Document 3, "Class entrypoint".
SERVICE_OF_THE_REFERENCE = SERVICE_OF_THE_GUIDE.replace("@rpc(export=True)", "@rpc()#Auto export")

COUNT_TO_THREE = """
steps = []
def step(): steps.append(1)
def done(): return len(steps) == 3
"""

# Document 3, "Get Runtime Information".
INFO = """
    info = current_worker()
    print(info.job_info, info.actor_info)
"""

# Document 3, "Remote call pattern": the interface, with its own bodies, `...`, bound to the role that provides it.
INTERFACE = """
from dlrover.python.unified.api.runtime import FutureSequence
from dlrover.python.unified.api.runtime.remote_call import bind

@bind("actor")
def vllm_wakeup() -> None: ...

@bind("actor")
def vllm_generate(prompt_token_ids, params) -> FutureSequence: ...
"""

PROVIDER = """
import remote_call
from dlrover.python.unified.api.runtime import export_rpc_instance, rpc

# Document 3, "Function interface"
@rpc(export=True)
def some_method():
    return "test1"

# Document 3, "RPC proxy"
class SimpleClass:
    @rpc()
    def hello(self, name: str) -> str:
        return f"Hello, {name}!"

@rpc
def sync_weights(payload):
    weights.append(payload)
    return payload

@rpc
def actor_forward(sequences):
    return [sequence * 2 for sequence in sequences]

weights = []

class Llm:
    is_awake = False
    def wake_up(self):
        self.is_awake = True

# Document 3, "Remote call pattern"
class VLLMActor:
    @rpc(remote_call.vllm_wakeup)
    def wake_up(self):
        self.llm.wake_up()

    @rpc(remote_call.vllm_generate)
    def generate(self, prompt_token_ids, params):
        assert self.llm.is_awake
        return [ids + params["tail"] for ids in prompt_token_ids]

    @rpc()
    def is_awake(self):
        return self.llm.is_awake

    def __init__(self):
        self.llm = Llm()
        export_rpc_instance("simple_class", SimpleClass())
"""

CALLER = """
import numpy
from provider import SimpleClass, VLLMActor, actor_forward
from dlrover.python.unified.api.runtime import RoleGroup, UserRpcProxy, create_rpc_proxy

def run():
    # Document 3, "Function interface": by name, through a role group
    assert RoleGroup("actor").call("some_method").result() == ["test1"]

    # Document 3, "RPC proxy"
    proxy = create_rpc_proxy("actor", "simple_class", SimpleClass)
    assert proxy.hello("World") == "Hello, World!"
    assert UserRpcProxy("learner-1", "simple_class", SimpleClass).hello("you") == "Hello, you!"

    # Document 3, "Automatic exposure": methods of the entry class, at the instance that the runtime made
    assert create_rpc_proxy("learner-1", None, VLLMActor).wake_up() is None
    assert RoleGroup("learner").call("is_awake").result() == [False, True]

    # Document 3, "RoleGroup and FutureSequence"
    payload, size, sequences = numpy.arange(4.0), 5, [1, 2, 3, 4, 5]
    rg = RoleGroup(name="agents", roles=["actor", "learner"])
    # broadcast
    sent = rg.call("sync_weights", payload)
    # batched calls
    future_seq = rg.call_batch(actor_forward, size, sequences)
    assert all((back == payload).all() for back in sent.result())
    assert len(rg) == len(sent.result()) == 3
    assert list(future_seq) == [2, 4, 6, 8, 10]
    assert repr(future_seq) == "FutureSequence(lens=[2, 2, 1])", future_seq

    # "lazy result retrieval and partial blocking"
    assert (future_seq[-1], future_seq[1:3], len(future_seq)) == (10, [4, 6], 5)

    # Document 3, "Remote call pattern"
    from remote_call import vllm_generate, vllm_wakeup
    vllm_wakeup()
    prompt_token_ids, params = [[1], [2, 3]], {"tail": [0]}
    result = vllm_generate(prompt_token_ids, params)
    assert list(result) == [[1, 0], [2, 3, 0]]
"""

# Document 3, "DataQueue".
OWNER = """
from dlrover.python.unified.api.runtime import DataQueue, RoleGroup

def run():
    # owner (usually rank 0 producer)
    queue_master = DataQueue[str]("test_queue", size=10, is_master=True)
    queue_master.put("data1", "data2")

    assert RoleGroup("consumer").call("get").result() == [["data1"]]
    assert queue_master.qsize() == 1
    queue_master.put_async("data3").result()
    assert queue_master.get(5) == ["data2", "data3"]
    assert queue_master.get_nowait() == []
"""

CONSUMER = """
from dlrover.python.unified.api.runtime import DataQueue, rpc

@rpc
def get():
    # client (producer or consumer)
    queue_client = DataQueue[str]("test_queue")
    return queue_client.get(1)

def run(): pass
"""

# Document 3, "RayDataLoaderIter".
LOADING = """
from torch.utils.data import DataLoader
from dlrover.python.unified.api.runtime import RayDataLoaderIter

class Squares:
    def __len__(self): return 32
    def __getitem__(self, i): return i * i

def train_step(batch): seen.extend(batch.tolist())

seen = []

def run():
    dataloader = DataLoader(Squares(), batch_size=4)
    # high-level pattern
    iterator = RayDataLoaderIter(dataloader, num_actors=4)
    for batch in iterator:
        train_step(batch)
    assert seen == [i * i for i in range(32)], seen
"""


@pytest.fixture(params=["native", "compat"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Runs a program with modules beside it (dots in a name: folders), which import what upstream's do; without a
    cluster, on one of its own.
    """
    is_native = request.param == "native"
    folder = tmp_path / "project"

    def run(script: str, cluster: LocalCluster | None = None, **modules: str) -> subprocess.CompletedProcess[str]:
        for name, text in {"program": script, **modules}.items():
            own = text.replace(blocks.UPSTREAM, "").replace("dlrover/python/unified", "")
            assert "unified" not in own.replace("examples.unified", "")
            path = folder / f"{name.replace('.', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text.replace(blocks.UPSTREAM, "unified") if is_native else text))
        inherited = {name: value for name, value in os.environ.items() if name != "UNIFIED_COMPAT"}
        home = {"UNIFIED_HOME": str(tmp_path / "home"), "UNIFIED_MASTER": cluster.address if cluster else ""}
        return subprocess.run(
            [sys.executable, *([] if is_native else ["-m", "unified.compat"]), "program.py"],
            cwd=folder,
            env={**inherited, "UNIFIED_PROGRESS": "plain", **home},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def job(nodes: int, devices: int, *workloads: str) -> str:
    return SUBMIT.format(nodes=nodes, devices=devices, workloads="\n".join(f"    {line}" for line in workloads))


def succeeded(done: subprocess.CompletedProcess[str], job_name: str = "") -> str:
    """What the workers printed. The job must have succeeded too: a document's script ignores its exit code."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"job {job_name}" in done.stderr.splitlines()[-1], done.stdout + done.stderr
    assert " finished after " in done.stderr.splitlines()[-1], done.stdout + done.stderr
    return done.stdout


def test_first_example_of_the_guide(local_cluster: Cluster, run: Run) -> None:
    """Its `xxx` is a name like any other; its gap `...` is left out."""
    done = run(blocks.FIRST_EXAMPLE, local_cluster(nodes=1, devices=4), xxx=TRAINER_OF_THE_GUIDE)
    assert succeeded(done) == "[TRAINER-0] trainer with v1 on node-1\n"


def test_single_role(local_cluster: Cluster, run: Run) -> None:
    """`torch` and `args` are given; the document's own `args` is a dict, which has no `__dict__`."""
    given = "import torch\nfrom argparse import Namespace\nargs = Namespace(data_dir='data/nanogpt/', batch_size=16)\n"
    modules = {"examples.unified.elastic.nanogpt.train": TRAIN_OF_FOUR_RANKS}
    done = run(given + textwrap.dedent(blocks.SINGLE_ROLE), local_cluster(nodes=2, devices=2), **modules)
    assert sorted(succeeded(done, "nanogpt").splitlines()) == [
        f"[ELASTIC-{rank}] trained by {rank} of data/nanogpt/" for rank in range(4)
    ]


def test_several_roles(local_cluster: Cluster, run: Run) -> None:
    """The outline's names are given, and it ends before a submit."""
    given = f"{blocks.IMPORT}worker_node_num, device_per_worker_node, log_level = 2, 4, 'INFO'\n"
    script = given + textwrap.dedent(blocks.OUTLINE) + "job.submit()\n"
    modules = dict.fromkeys(("module.a", "module.b", "entrypoint"), SAYS_ITS_ROLE)
    assert sorted(succeeded(run(script, local_cluster(nodes=2, devices=4), **modules)).splitlines()) == [
        "[a-0] a 0 {} INFO",
        "[a-1] a 1 {} INFO",
        "[b-0] b 0 {} INFO",
        "[role-0] role 0 {} INFO",
    ]


def test_reinforcement_learning_on_a_laptop(run: Run) -> None:
    """It asks for 18 CPUs: a cluster of its own shares out those that there are."""
    given = f"from omegaconf import DictConfig\n{blocks.IMPORT}args = {{'lr': 0.5}}\n"
    modules = {f"module.{role}": SAYS_ITS_ROLE for role in ("trainer", "rollout", "reward")}
    done = run(given + textwrap.dedent(blocks.RL), **modules)
    assert sorted(succeeded(done, "rl_job").splitlines()) == sorted(
        f"[{role}-{rank}] {role} {rank} {{'lr': 0.5}} -"
        for role, total in {"trainer": 2, "rollout": 4, "reward": 1}.items()
        for rank in range(total)
    )


def test_entry_points(local_cluster: Cluster, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """All three in one job; the function runs in a round of two ranks, and also prints who it is."""
    monkeypatch.setenv("UNIFIED_JOB_NAME", "entries")
    trained = (
        "import torch, torch.distributed as dist\n"
        "def train(args):\n"
        "    total = torch.tensor([float(args.lr)]); dist.all_reduce(total)\n"
        "    assert total.item() == 2 * args.lr, total\n"
    )
    done = run(
        job(
            *(2, 1, '.train("my_train.run").nnodes(2).nproc_per_node(1)'),
            '.workload("service", "my_service.TrainerService").resource(cpu=0.1)',
            '.workload("other", "my_other_service.TrainerService").resource(cpu=0.1)',
        ),
        local_cluster(nodes=2, devices=1),
        my_train=FUNCTION_ENTRY + INFO + trained,
        my_service=SERVICE_OF_THE_GUIDE + COUNT_TO_THREE,
        my_other_service=SERVICE_OF_THE_REFERENCE + COUNT_TO_THREE,
    )
    printed = [line for line in succeeded(done, "entries").splitlines() if line.startswith("[ELASTIC-")]
    assert len([line for line in printed if "ELASTIC" in line.partition("] ")[2] and "entries" in line]) == 2


@pytest.mark.parametrize(
    ("nodes", "devices", "workloads", "modules"),
    [
        pytest.param(
            *(2, 1),
            [
                '.workload("caller", "caller.run").resource(cpu=0.1)',
                '.workload("actor", "provider.VLLMActor").resource(cpu=0.1).not_driver()',
                '.workload("learner", "provider.VLLMActor").total(2).resource(cpu=0.1).not_driver()',
            ],
            {"remote_call": INTERFACE, "provider": PROVIDER, "caller": CALLER},
            id="calls",
        ),
        pytest.param(
            *(1, 2),
            [
                '.workload("owner", "owner.run").resource(cpu=0.1)',
                '.workload("consumer", "consumer.run").resource(cpu=0.1).not_driver()',
            ],
            {"owner": OWNER, "consumer": CONSUMER},
            id="queue",
        ),
        pytest.param(
            *(1, 1), ['.workload("trainer", "loading.run").resource(cpu=0.1)'], {"loading": LOADING}, id="data loader"
        ),
    ],
)
def test_calls_queues_and_data_loaders(
    local_cluster: Cluster, run: Run, nodes: int, devices: int, workloads: list[str], modules: dict[str, str]
) -> None:
    succeeded(run(job(nodes, devices, *workloads), local_cluster(nodes=nodes, devices=devices), **modules))


@pytest.mark.parametrize("run", ["compat"], indirect=True)
def test_command_line_of_another_launcher_on_a_cluster_of_its_own(run: Run, tmp_path: Path) -> None:
    """The worker is a script, and has all aliases; without a master the job brings its own cluster."""
    script = tmp_path / "root/dlrover/python/unified/tests/integration_test/dummy_run.py"
    script.parent.mkdir(parents=True)
    script.write_text(SCRIPT_OF_A_WORKER)
    done = run(f"Your_dlrover_root_dir = {str(tmp_path / 'root')!r}\n" + textwrap.dedent(blocks.COMMAND))
    said = "worker of test_cmd_api with ['--test', '0'] unified.job.config unified.compat.dtruntime"
    assert said in succeeded(done, "test_cmd_api")


def test_command_line_of_another_launcher(local_cluster: Cluster, project: Project, tmp_path: Path) -> None:
    """Document 2, "Single role(via CLI command)", with its submit."""
    project(dummy_run="import sys; assert sys.argv[1:] == ['--test', '0'], sys.argv")
    cluster = local_cluster(nodes=1, devices=1)
    cmd = f"dlrover-run --nnodes=1 --nproc_per_node=1 {tmp_path}/project/dummy_run.py --test 0"
    job = DLJobBuilder().by_dlrover_run_cmd(cmd).device_type("CPU").build()
    assert job.submit("test_cmd_api", master_cpu=1, master_memory=128, master=cluster.address) == 0


def test_a_job_as_json(local_cluster: Cluster, tmp_path: Path) -> None:
    """As ``python -m dlrover.python.unified.driver.main`` takes it, on a cluster that knows nothing of upstream."""
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
