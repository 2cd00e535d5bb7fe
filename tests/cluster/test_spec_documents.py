"""The code of the reference documents about life inside a worker, on a real cluster, import prefix changed.

Blocks are kept as text. Names that a document leaves to its reader (`train`, `done`, `step`, `actor_forward`, …) are
defined around them, bodies that are `...` there are filled, and nothing else in them is changed.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.conftest import Project
from unified.api.builder import DLJobBuilder
from unified.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

Cluster = Callable[..., LocalCluster]


# Documents 1 ("Function entrypoint example") and 3 ("Function entrypoint").
FUNCTION_ENTRY = """
from unified.api.runtime.worker import current_worker

def run():
    args = current_worker().job_info.user_config
    # prepare data, model, optimizer using args
    train(args)
"""

# Document 1, "Class entrypoint example with RPC exposure".
SERVICE_OF_THE_GUIDE = """
from unified.api.runtime import rpc
from unified.api.runtime.worker import current_worker

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


def test_function_and_class_entry_points(local_cluster: Cluster, project: Project) -> None:
    """All three in one job; the function runs in a round of two ranks, and also prints who it is."""
    trained = (
        "import torch, torch.distributed as dist\n"
        "def train(args):\n"
        "    total = torch.tensor([float(args.lr)]); dist.all_reduce(total)\n"
        "    assert total.item() == 2 * args.lr, total\n"
    )
    project(
        my_train=FUNCTION_ENTRY + INFO + trained,
        my_service=SERVICE_OF_THE_GUIDE + COUNT_TO_THREE,
        my_other_service=SERVICE_OF_THE_REFERENCE + COUNT_TO_THREE,
    )
    job = (
        DLJobBuilder()
        .node_num(2)
        .device_per_node(1)
        .device_type("CPU")
        .config({"lr": 0.5})
        .train("my_train.run")
        .nnodes(2)
        .nproc_per_node(1)
        .workload("service", "my_service.TrainerService")
        .resource(cpu=0.1)
        .workload("other", "my_other_service.TrainerService")
        .resource(cpu=0.1)
        .build()
    )
    handle = local_cluster(nodes=2, devices=1).submit(job, "entries")
    assert handle.wait(timeout=50) == 0
    printed = list(handle.logs(role="ELASTIC"))
    assert len([line for line in printed if "ELASTIC" in line and "entries" in line]) == 2


# Document 3, "Remote call pattern": the interface, with its own bodies, `...`, bound to the role that provides it.
INTERFACE = """
from unified.api.runtime import FutureSequence
from unified.api.runtime.remote_call import bind

@bind("actor")
def vllm_wakeup() -> None: ...

@bind("actor")
def vllm_generate(prompt_token_ids, params) -> FutureSequence: ...
"""

PROVIDER = """
import remote_call
from unified.api.runtime import export_rpc_instance, rpc

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
from unified.api.runtime import RoleGroup, UserRpcProxy, create_rpc_proxy

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


def test_calls_between_roles(local_cluster: Cluster, project: Project) -> None:
    project(remote_call=INTERFACE, provider=PROVIDER, caller=CALLER)
    job = (
        DLJobBuilder()
        .node_num(2)
        .device_per_node(1)
        .device_type("CPU")
        .workload("caller", "caller.run")
        .resource(cpu=0.1)
        .workload("actor", "provider.VLLMActor")
        .resource(cpu=0.1)
        .not_driver()
        .workload("learner", "provider.VLLMActor")
        .total(2)
        .resource(cpu=0.1)
        .not_driver()
        .build()
    )
    handle = local_cluster(nodes=2, devices=1).submit(job, "calls")
    code = handle.wait(timeout=50)
    assert code == 0, handle.status().end


# Document 3, "DataQueue".
OWNER = """
from unified.api.runtime import DataQueue, RoleGroup

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
from unified.api.runtime import DataQueue, rpc

@rpc
def get():
    # client (producer or consumer)
    queue_client = DataQueue[str]("test_queue")
    return queue_client.get(1)

def run(): pass
"""


def test_queue_between_roles(local_cluster: Cluster, project: Project) -> None:
    project(owner=OWNER, consumer=CONSUMER)
    builder = DLJobBuilder().node_num(1).device_per_node(2).device_type("CPU")
    builder.workload("owner", "owner.run").resource(cpu=0.1)
    builder.workload("consumer", "consumer.run").resource(cpu=0.1).not_driver()
    handle = local_cluster(nodes=1, devices=2).submit(builder.build(), "queue")
    assert handle.wait(timeout=50) == 0, handle.status().end


# Document 3, "RayDataLoaderIter".
LOADING = """
from torch.utils.data import DataLoader
from unified.api.runtime import RayDataLoaderIter

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


def test_data_loader_in_other_processes(local_cluster: Cluster, project: Project) -> None:
    project(loading=LOADING)
    job = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU").workload("trainer", "loading.run")
    handle = local_cluster(nodes=1, devices=1).submit(job.resource(cpu=0.1).build(), "loading")
    assert handle.wait(timeout=50) == 0, handle.status().end


def test_command_line_of_another_launcher(local_cluster: Cluster, project: Project, tmp_path: Path) -> None:
    """Document 2, "Single role(via CLI command)", with its submit."""
    project(dummy_run="import sys; assert sys.argv[1:] == ['--test', '0'], sys.argv")
    cluster = local_cluster(nodes=1, devices=1)
    cmd = f"dlrover-run --nnodes=1 --nproc_per_node=1 {tmp_path}/project/dummy_run.py --test 0"
    job = DLJobBuilder().by_dlrover_run_cmd(cmd).device_type("CPU").build()
    assert job.submit("test_cmd_api", master_cpu=1, master_memory=128, master=cluster.address) == 0
