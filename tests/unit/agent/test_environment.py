"""What a node says in a worker's environment: which devices it sees, which interface it uses."""

from typing import Any, Literal

import pytest
from msgspec.structs import replace

from tests.support.agent_core import FACTS
from unified.job.spec import EntryPoint, JobSpec, RoleSpec
from unified.protocol.agent_master import DesiredWorker
from unified.protocol.records import Device, NodeResources
from unified_agent.core.launching import start_of
from unified_agent.environment import (
    RESOLVER,
    NodeFacts,
    ZygoteKey,
    devices_of,
    starting_variables,
    worker_environment,
    zygote_of,
)
from unified_agent.spawn import tunables

ENTRY = EntryPoint(kind="attribute", target="m")
ROLE = RoleSpec(name="trainer", kind="elastic", entry_point=ENTRY, total=4, per_group=2)
WORKER = DesiredWorker(
    job_id="job-1",
    name="trainer_4-3_2-1",
    worker_incarnation=2,
    kind="worker",
    role="trainer",
    place=ROLE.place(3),
    devices=[1],
)


def job(role: RoleSpec = ROLE, accelerator_type: Literal["GPU", "CPU", "TPU"] = "GPU") -> JobSpec:
    return JobSpec(name="job", roles=[role], accelerator_type=accelerator_type)


def node(kind: str = "cuda", count: int = 4, **facts: Any) -> NodeFacts:
    devices = [Device(index=index, kind=kind) for index in range(count)]
    resources = NodeResources(cpu=8, memory_mb=1, disk_mb=1, devices=devices)
    return replace(FACTS, **{"resources": resources, "interface": "eth0", **facts})


def test_it_says_what_the_node_is() -> None:
    env = worker_environment(job(), WORKER, node(), num_local_workers=2)
    expected = {
        "UNIFIED_WORKER": "job-1/trainer_4-3_2-1/2",
        "RES_OPTIONS": RESOLVER,
        "OMP_NUM_THREADS": "4",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "CUDA_VISIBLE_DEVICES": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "ACCELERATE_TORCH_DEVICE": "cuda:0",
    }
    assert env == expected


def test_a_store_host_needs_little() -> None:
    store = DesiredWorker(job_id="job-1", name="store", worker_incarnation=0, kind="store")
    assert worker_environment(job(), store, node()) == {"UNIFIED_WORKER": "job-1/store/0", "RES_OPTIONS": RESOLVER}


@pytest.mark.parametrize(
    ("kind", "visible", "torch_device"),
    [
        ("cuda", {"CUDA_VISIBLE_DEVICES": "1"}, "cuda:0"),
        ("rocm", {"HIP_VISIBLE_DEVICES": "1"}, "cuda:0"),
        ("npu", {"ASCEND_RT_VISIBLE_DEVICES": "1"}, "npu:0"),
        ("virtual", {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}, "cpu"),
    ],
)
def test_each_vendor_has_its_variable(kind: str, visible: dict[str, str], torch_device: str) -> None:
    env = worker_environment(job(), WORKER, node(kind))
    assert {name: value for name, value in env.items() if name.endswith("VISIBLE_DEVICES")} == visible
    assert env["ACCELERATE_TORCH_DEVICE"] == torch_device


@pytest.mark.parametrize(
    ("worker", "role", "facts", "expected"),
    [
        # without devices none is seen
        ({"devices": []}, {}, node(), {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_TORCH_DEVICE": "cpu"}),
        # Ascend devices are listed in ascending order
        ({"group_devices": [0, 2, 1, 3]}, {}, node("npu"),
         {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3", "ACCELERATE_TORCH_DEVICE": "npu:1"}),
        # without automatic visibility the whole node is seen
        ({"group_devices": [3, 1]}, {"auto_visible_devices": False}, node(),
         {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "ACCELERATE_TORCH_DEVICE": "cuda:1"}),
        # devices are called as the agent was told to call them
        ({}, {}, node(count=2, device_ids=["4", "GPU-abc"], inherited={"CUDA_VISIBLE_DEVICES": "4,GPU-abc"}),
         {"CUDA_VISIBLE_DEVICES": "GPU-abc", "CUDA_DEVICE_ORDER": None}),
        # what the operator set for the agent stays
        ({}, {}, node(inherited={"OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}),
         {"OMP_NUM_THREADS": None, "GLOO_SOCKET_IFNAME": None, "NCCL_SOCKET_IFNAME": None}),
        # NCCL is not sent to loopback
        ({}, {}, node(interface="lo"), {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": None}),
        # threads are for the cores that are there, however many are offered
        ({}, {}, node(host_cpus=4), {"OMP_NUM_THREADS": "4"}),
    ],
)  # fmt: skip
def test_what_a_worker_is_told(
    worker: dict[str, Any], role: dict[str, Any], facts: NodeFacts, expected: dict[str, str | None]
) -> None:
    env = worker_environment(job(replace(ROLE, **role)), replace(WORKER, **worker), facts)
    assert {name: env.get(name) for name in expected} == expected


def test_cpu_slots_are_not_taken_for_real_devices() -> None:
    assert devices_of(job(accelerator_type="CPU"), [1], node("cuda")) == []
    assert [one.index for one in devices_of(job(accelerator_type="CPU"), [1], node("virtual"))] == [1]


def test_a_worker_sees_the_devices_of_its_group_and_takes_its_own() -> None:
    worker = replace(WORKER, group_devices=[3, 1])
    launch = start_of(worker, job(), node(), num_neighbours=1, relay="", directory=[]).launch
    assert (launch.env["CUDA_VISIBLE_DEVICES"], launch.env["ACCELERATE_TORCH_DEVICE"]) == ("3,1", "cuda:1")
    assert [device.index for device in launch.devices] == [1]


@pytest.mark.parametrize(("num_local_workers", "threads"), [(1, "8"), (3, "2"), (100, "1")])
def test_the_cpus_are_shared_among_the_workers_of_the_node(num_local_workers: int, threads: str) -> None:
    env = worker_environment(job(), WORKER, node(), num_local_workers=num_local_workers)
    assert env["OMP_NUM_THREADS"] == threads


def test_a_launch_says_where_things_are() -> None:
    launch = start_of(WORKER, job(), node(), num_neighbours=1, relay="tcp://r:1", directory=[]).launch
    assert launch.log_file == "/logs/job-1/trainer_4-3_2-1/2.err"
    assert (launch.relay, launch.run_dir, launch.address, launch.incarnation) == ("tcp://r:1", "/run/x", "10.0.0.1", 2)
    assert [device.index for device in launch.devices] == [1]


def test_large_copies_of_workers_write_past_the_caches_unless_the_operator_says_otherwise() -> None:
    ours = "glibc.cpu.x86_non_temporal_threshold=16777216"
    assert tunables("", 32 << 20) == ours
    assert tunables("glibc.malloc.check=1", 32 << 20) == f"glibc.malloc.check=1:{ours}"
    theirs = "glibc.cpu.x86_non_temporal_threshold=0x4040"
    assert tunables(theirs, 32 << 20) == theirs
    assert tunables("", 0) == ""


def test_threads_are_the_host_s_cores_over_all_its_workers_however_many_agents_it_has() -> None:
    def threads(host_cpus: float, offered: float, own: int, on_host: int) -> str:
        facts = node(host_cpus=host_cpus, resources=replace(FACTS.resources, cpu=offered))
        env = worker_environment(job(), WORKER, facts, num_local_workers=own, num_host_workers=on_host)
        return env["OMP_NUM_THREADS"]

    assert threads(host_cpus=16, offered=16, own=2, on_host=2) == "8"
    assert threads(host_cpus=16, offered=16, own=2, on_host=8) == "2"
    assert threads(host_cpus=16, offered=4, own=2, on_host=8) == "2"  # what this agent offers is its share of the host
    assert threads(host_cpus=2, offered=2, own=2, on_host=8) == "1"


def test_what_is_read_at_the_start_of_an_interpreter_needs_one_that_starts_with_it() -> None:
    early = {"PYTHONHASHSEED": "0", "TORCH_LOGS": "+dynamo", "OMP_PROC_BIND": "close", "LD_PRELOAD": "/x.so"}
    late = {"PYTHON_VERSION": "3.12", "PYTORCH_BUILD_VERSION": "2.9", "PYTHON_GET_PIP_URL": "x"}
    late |= {
        "FOO": "1",
        "OMP_NUM_THREADS": "2",
        "PYTHONPATH": "/p",
        "TORCH_HOME": "/h",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
    }
    assert starting_variables({**early, **late}, {}) == early
    assert starting_variables({**early, **late}, {**early, "PYTHONHASHSEED": "1"}) == {"PYTHONHASHSEED": "0"}


# Zygotes


PYTHON = FACTS.python
HF = "transformers"


@pytest.mark.parametrize(
    ("spec", "agents", "key"),
    [
        ({}, [], ZygoteKey(PYTHON)),
        ({"preload": [HF]}, [], ZygoteKey(PYTHON, (HF,))),
        ({"preload": [HF], "python": "/venv/bin/python"}, [HF], ZygoteKey("/venv/bin/python", (HF,))),
        ({"python": "/venv/bin/python"}, [HF], ZygoteKey("/venv/bin/python")),
        ({"preload": [HF], "python": PYTHON}, [HF, "trl"], ZygoteKey(PYTHON, (HF, "trl"))),
        ({"preload": [HF, "trl"]}, [HF], ZygoteKey(PYTHON, (HF, "trl"))),
        ({"preload": [HF]}, ["transformers.Trainer"], ZygoteKey(PYTHON, ("transformers.Trainer",))),
        ({"preload": [HF]}, ["transformers_x"], ZygoteKey(PYTHON, (HF,))),
        ({"preload": ["torch", "numpy"]}, [], ZygoteKey(PYTHON)),
        ({"preload": [HF], "start_method": "spawn"}, [], ZygoteKey(PYTHON)),
    ],
)
def test_a_job_has_the_agents_zygote_if_that_has_its_interpreter_and_modules(
    spec: dict[str, Any], agents: list[str], key: ZygoteKey
) -> None:
    assert zygote_of(replace(job(), **spec), node(preload=tuple(agents))) == key


def test_a_jobs_zygote_imports_with_the_variables_that_all_its_roles_have() -> None:
    ours = {"HF_HOME": "/data", "SAME": "1", "UNIFIED_TRACE": "1", "PYTHONPATH": "lib"}
    ours["PORT"] = "{port}"  # of each worker
    roles = [replace(ROLE, name=name, envs={**ours, "OF_ONE": name, name: "1"}) for name in ("a", "b")]
    spec = replace(job(), roles=roles, preload=[HF])
    facts = node(inherited={"SAME": "1", "HF_HOME": "/home"}, preload=(HF,))
    assert zygote_of(spec, facts) == ZygoteKey(PYTHON, (HF,), (("HF_HOME", "/data"),))
    assert zygote_of(replace(spec, preload=[]), facts) == facts.zygote, "no import of the job's reads them"


def test_a_variable_that_a_jobs_zygote_starts_with_needs_no_new_interpreter() -> None:
    role = replace(ROLE, envs={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    for preload, is_fresh in (([], True), ([HF], False)):
        start = start_of(WORKER, replace(job(role), preload=preload), node(), num_neighbours=1, relay="", directory=[])
        assert (start.is_fresh, bool(start.env)) == (is_fresh, is_fresh)
        assert start.zygote == zygote_of(replace(job(role), preload=preload), node())
