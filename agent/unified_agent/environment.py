"""The environment that a node gives a worker, from the worker's description and the node's facts. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from unified.job.driver import is_read_at_start
from unified.job.names import num_ports
from unified.job.spec import JobSpec
from unified.protocol.agent_master import DesiredWorker
from unified.protocol.records import Device, NodeResources
from unified.values import Value

VISIBILITY = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""Variables by kind of device. On ROCm only HIP_VISIBLE_DEVICES is set: ROCR_VISIBLE_DEVICES filters and renumbers
first, so the same ids in both hide devices; an agent's own ROCR_VISIBLE_DEVICES is inherited and already counted."""

RESOLVER = "timeout:1 attempts:2"
"""glibc's RES_OPTIONS. torch's TCPStore looks up the names of its peers' addresses again and again, and glibc waits 5 s
for each packet that a name server loses: long enough to be taken for a hang. Two tries of a second each remain."""

RECORDER, RECORDED = "TORCH_FR_BUFFER_SIZE", "2000"
"""Number of collectives that torch's flight recorder keeps: `unified stack` sees there which rank did not enter one. It
is the default of newer releases. Its cost beside a collective is too small to measure."""

_IMPORTED_ANYWAY = ("numpy", "omegaconf", "torch.distributed")
"""Modules that users may name and that each zygote imports."""
_NOT_AT_IMPORT = ("UNIFIED_", "PYTHONPATH")
"""Beginnings of variables that a job's zygote does not get: a worker reads them, and relative paths are its own."""

_TORCH_NAME = {"cuda": "cuda", "rocm": "cuda", "npu": "npu"}


class ZygoteKey(NamedTuple):
    """The properties of a zygote that decide which workers it can fork."""

    python: str
    modules: tuple[str, ...] = ()
    """Modules that it imports for a job, or by the agent's flag."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables with which it imports them, above the agent's environment."""


class NodeFacts(Value, frozen=True, dict=True):
    """Facts that an agent knows of its node and of itself; they never change."""

    node: str
    incarnation: str
    hostname: str
    host_id: str
    address: str
    master: str
    pid: int
    run_dir: str
    log_dir: str
    resources: NodeResources
    """Offered resources; an operator or an embedded cluster may set them higher than the real ones."""
    host_cpus: float = math.inf
    """CPUs that the agent's processes may really use."""
    labels: dict[str, str] = {}
    interface: str = ""
    """Network interface that has `address`; empty if none has."""
    device_ids: list[str] = []
    """Names of the devices in a visibility variable, by device index. Empty: the indices."""
    inherited: dict[str, str] = {}
    """The agent's own environment, which workers inherit."""
    log_archive: str = ""
    """Address at which whole logs are archived; empty: nowhere."""
    python: str = ""
    preload: tuple[str, ...] = ()
    """Modules that the agent's own zygote imports."""

    @property
    def zygote(self) -> ZygoteKey:
        """Key of the agent's own zygote."""
        return ZygoteKey(self.python, self.preload)

    @cached_property
    def devices(self) -> dict[int, Device]:
        return {device.index: device for device in self.resources.devices}


def log_path(log_dir: str, job_id: str, worker: str, incarnation: int, stream: str) -> str:
    """Return the file of one stream (``out`` or ``err``) of one incarnation."""
    return f"{log_dir}/{job_id}/{worker}/{incarnation}.{stream}"


def devices_of(spec: JobSpec, indices: Sequence[int], node: NodeFacts) -> list[Device]:
    """Return the node's devices with these indices, in their order.

    A job for CPUs on a node with real accelerators counts slots, not devices, so it gets no devices.
    """
    found = [node.devices[index] for index in indices if index in node.devices]
    if spec.accelerator_type == "CPU":
        return [device for device in found if device.kind == "virtual"]
    return found


def seen_devices(spec: JobSpec, worker: DesiredWorker, node: NodeFacts) -> list[Device]:
    """Return the devices a worker may see: the node's without automatic visibility, else its group's, else its own."""
    if not spec.role(worker.role).auto_visible_devices:
        return list(node.resources.devices)
    seen = devices_of(spec, worker.group_devices or worker.devices, node)
    # CANN finds no device at all if the list in its variable does not ascend.
    return sorted(seen, key=lambda device: device.index if device.kind == "npu" else 0)


def worker_environment(
    spec: JobSpec,
    worker: DesiredWorker,
    node: NodeFacts,
    *,
    num_local_workers: int = 1,
    num_host_workers: int = 0,
) -> dict[str, str]:
    """Return the node's part of a worker's `os.environ`. The worker adds its identity, and its role's variables last.

    Args:
        num_local_workers: workers that share this node's CPUs.
        num_host_workers: workers of all agents that share this host's CPUs; 0: only this agent's.
    """
    # A mark by which processes that an incarnation leaves behind are recognised.
    env = {"UNIFIED_WORKER": f"{worker.job_id}/{worker.name}/{worker.worker_incarnation}"}
    if "RES_OPTIONS" not in node.inherited:
        env["RES_OPTIONS"] = RESOLVER
    if worker.kind == "store":
        return env
    env |= _network_environment(node)
    if RECORDER not in node.inherited:
        env[RECORDER] = RECORDED
    env |= _device_environment(devices_of(spec, worker.devices, node), seen_devices(spec, worker, node), node)
    if "OMP_NUM_THREADS" not in node.inherited:  # as torchrun does, but with a share of the node instead of 1
        of_node = node.resources.cpu / max(1, num_local_workers)
        of_host = node.host_cpus / max(1, num_local_workers, num_host_workers)
        env["OMP_NUM_THREADS"] = str(max(1, int(min(of_node, of_host))))
    return env


def starting_variables(envs: Mapping[str, str], inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a role that are read at the start of an interpreter, a C library or torch, and that
    differ from the zygote's: workers of the role need new interpreters.
    """
    return {name: value for name, value in envs.items() if is_read_at_start(name) and inherited.get(name) != value}


def zygote_of(spec: JobSpec, node: NodeFacts) -> ZygoteKey:
    """Return the zygote of a job's workers: the agent's own if it has the interpreter, modules and variables."""
    python, modules = spec.python or node.python, tuple(spec.preload) if spec.start_method == "fork" else ()
    common = set.intersection(*(set(role.envs.items()) for role in spec.roles)) if modules else set()
    given = {name: value for name, value in common - node.inherited.items() if not name.startswith(_NOT_AT_IMPORT)}
    env = {name: value for name, value in given.items() if not num_ports([value])}  # each worker has its own ports
    imported = [f"{name}." for name in (*_IMPORTED_ANYWAY, *node.preload)]  # with the packages that they are in
    is_own = not env and all(any(each.startswith(f"{name}.") for each in imported) for name in modules)
    return node.zygote if is_own and python == node.python else ZygoteKey(python, modules, tuple(sorted(env.items())))


def _network_environment(node: NodeFacts) -> dict[str, str]:
    """Return variables with the interface to use; without them Gloo takes that of the host's name, often loopback."""
    if not node.interface:
        return {}
    env = {"GLOO_SOCKET_IFNAME": node.interface}
    if not node.interface.startswith("lo"):  # NCCL refuses loopback
        env["NCCL_SOCKET_IFNAME"] = node.interface
    return {name: value for name, value in env.items() if name not in node.inherited}


def _device_environment(own: Sequence[Device], seen: Sequence[Device], node: NodeFacts) -> dict[str, str]:
    real = [device for device in seen if device.kind in VISIBILITY]
    # A worker without real devices must not see the real devices of the host.
    env = {} if real else dict.fromkeys(VISIBILITY.values(), "")
    for kind, variable in VISIBILITY.items():
        indices = [device.index for device in real if device.kind == kind]
        if indices:
            named = dict(enumerate(node.device_ids))
            env[variable] = ",".join(named.get(index, str(index)) for index in indices)
    if "CUDA_VISIBLE_DEVICES" not in node.inherited and any(device.kind == "cuda" for device in real):
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML's order, as in our indices; CUDA's own is by speed
    env["ACCELERATE_TORCH_DEVICE"] = _torch_device(own, real)
    return env


def _torch_device(own: Sequence[Device], seen: Sequence[Device]) -> str:
    """Return the worker's first device, as ``cuda:1``; torch numbers the devices that the process sees."""
    if not own or own[0].kind not in _TORCH_NAME:
        return "cpu"
    same_kind = [device.index for device in seen if device.kind == own[0].kind]
    return f"{_TORCH_NAME[own[0].kind]}:{same_kind.index(own[0].index)}"
