"""Options of the manifests. The command line is made from these records: `host_network` is ``--host-network``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta, field

from unified.errors import UsageError
from unified.values import Value

_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""A label that is short enough for what Kubernetes adds: ``-agent-``, a number, a hash."""
_OBJECT = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_IMAGE = re.compile(r"[a-z0-9]([A-Za-z0-9._/:@-]*[A-Za-z0-9])?")
_CPUS = re.compile(r"(?!0*\.?0*m?\Z)(\d+(\.\d{1,3})?|\d+m)")
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?")
_FACTORS = {"": 1, **{unit: 1024**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"), 1)}}
_FACTORS |= {unit: 1000**power for power, unit in enumerate(("k", "M", "G", "T", "P"), 1)}
_LEAST_BYTES = 256 * 1024**2
_LARGEST_UID = 2**31 - 1
_SET_HERE = re.compile(r"HOME|USER|POD_IP|NODE_ID|JOB_INDEX|UNIFIED_(MASTER|HOME|RUN_DIR|KEY_FILE)")
_MOUNTED_HERE = re.compile(r"/tmp|/dev/shm|/etc/unified(/.*)?|/var/lib/unified(/.*)?")


class PodOptions(Value, frozen=True):
    """Options that `ClusterOptions` and `RunOptions` share.

    Raises:
        UsageError: an option that Kubernetes or the daemons would refuse, in one sentence.
    """

    name: Annotated[str, Meta(description="Name of all objects, or its beginning.")] = "unified"
    namespace: Annotated[str, Meta(description="Their namespace; else that of kubectl.")] = ""
    image: Annotated[str, Meta(description="An image with unified-runtime.")] = "unified-runtime:latest"
    agents: Annotated[int | None, Meta(description="Pods with an agent (2).")] = None
    gpus: Annotated[int, Meta(description="GPUs of each.")] = 0
    gpu_resource: Annotated[str, Meta(description="Their name.")] = "nvidia.com/gpu"
    cpus: Annotated[str, Meta(description="CPUs of each.")] = "2"
    memory: Annotated[str, Meta(description="Memory of each, /dev/shm included.")] = "4Gi"
    shm: Annotated[str, Meta(description="Size of /dev/shm; else half of the memory.")] = ""
    grace: Annotated[int, Meta(description="Seconds to save when a pod is to end; the pod has 30 more.")] = 60
    key_secret: Annotated[str, Meta(description="The Secret with the cluster's key, as cluster.key.")] = "unified-key"
    uid: Annotated[int, Meta(description="User, group and fsGroup of the pods.")] = 1000
    host_network: Annotated[bool, Meta(description="Agents in the network of their nodes, as RDMA may need.")] = False
    resource: Annotated[dict[str, int], Meta(description="More of a device plugin, such as rdma/hca=1.")] = field(
        default_factory=dict
    )
    claim: Annotated[
        dict[str, str], Meta(description="A PersistentVolumeClaim in the agents' pods: CLAIM=/FOLDER.")
    ] = field(default_factory=dict)
    env: Annotated[dict[str, str], Meta(description="A variable of agents and workers.")] = field(default_factory=dict)
    node_selector: Annotated[dict[str, str], Meta(description="A label of the agents' nodes.")] = field(
        default_factory=dict
    )
    service_account: Annotated[str, Meta(description="Account of the pods, which need no right.")] = ""
    scheduler: Annotated[str, Meta(description="Scheduler of the pods, such as volcano.")] = ""

    def __post_init__(self) -> None:
        for fault in self._faults():
            raise UsageError(fault)

    def _faults(self) -> Iterator[str]:
        letters = "lower-case letters, digits and '-'"
        if not _NAME.fullmatch(self.name):
            yield f"--name {self.name!r} is not allowed: {letters}, a letter first, at most 40 characters."
        if self.namespace and not _LABEL.fullmatch(self.namespace):
            yield f"--namespace {self.namespace!r} is no DNS label: {letters}."
        if not _IMAGE.fullmatch(self.image):
            yield f"--image {self.image!r} is no image: write it as REGISTRY/NAME:TAG."
        for flag, name in {"--key-secret": self.key_secret, **self._references()}.items():
            if (name or flag == "--key-secret") and not _OBJECT.fullmatch(name):
                yield f"{flag} {name!r} is no name of an object: {letters}."
        for flag, number, least in self._numbers():
            if number < least:
                yield f"{flag} {number} is below {least}."
        if self.uid > _LARGEST_UID:
            yield f"--uid {self.uid} is above {_LARGEST_UID}, the largest of Kubernetes."
        if self.gpus and not self.num_agents:
            yield f"--gpus {self.gpus} belong to agents, and --agents is 0: give --agents as well."
        if not _CPUS.fullmatch(self.cpus):
            yield f"--cpus {self.cpus!r} is no number of CPUs: write 8, 0.5 or 500m."
        if amount("--memory", self.memory) < _LEAST_BYTES:
            yield f"--memory {self.memory} is too little for an agent and its workers: 256Mi is the least."
        if not 0 < amount("--shm", self.shm_size) <= amount("--memory", self.memory):
            yield f"--shm {self.shm} must be above 0 and at most --memory {self.memory}, which includes it."
        for key, value in self.node_selector.items():
            if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
                yield f"--node-selector {key}={value} is no label of a node."
        if not _is_resource(self.gpu_resource):
            yield f"--gpu-resource {self.gpu_resource!r} is no resource of a device plugin: write DOMAIN/NAME."
        for key, number in self.resource.items():
            if not _is_resource(key) or number < 1:
                yield f"--resource {key}={number} is no resource of a device plugin: write DOMAIN/NAME=NUMBER."
        if self.gpus and self.gpu_resource in self.resource:
            yield f"--gpus and --resource both say how many {self.gpu_resource} a pod has: leave one out."
        for key in self.env:
            if not _VARIABLE.fullmatch(key):
                yield f"--env {key!r} is no name of a variable."
            if _SET_HERE.fullmatch(key):
                yield f"--env {key} is set by the manifest itself: leave it out."
        paths = list(self.claim.values())
        for claim, path in self.claim.items():
            if not _OBJECT.fullmatch(claim):
                yield f"--claim {claim!r} is no name of an object: {letters}."
            if not re.fullmatch(r"(/[^/:]+)+", path) or _MOUNTED_HERE.fullmatch(path):
                yield f"--claim {claim}={path} cannot be mounted there: write CLAIM=/FOLDER, with a folder of its own."
            if paths.count(path) > 1:
                yield f"two claims have the folder {path}: give each --claim a folder of its own."

    def _references(self) -> dict[str, str]:
        """Return the names of objects that must exist already, by flag."""
        return {"--service-account": self.service_account, "--scheduler": self.scheduler}

    def _numbers(self) -> list[tuple[str, int, int]]:
        """Return flag, number and least allowed number of each numeric option."""
        return [
            ("--agents", self.num_agents, 0),
            ("--gpus", self.gpus, 0),
            ("--grace", self.grace, 0),
            ("--uid", self.uid, 1),
        ]

    @property
    def num_agents(self) -> int:
        """Number of agents; default 2."""
        return 2 if self.agents is None else self.agents

    @property
    def shm_size(self) -> str:
        """Size of /dev/shm as Kubernetes writes it; default half of the memory."""
        return self.shm or f"{amount('--memory', self.memory) // 2 // 1024**2}Mi"


class ClusterOptions(PodOptions, frozen=True):
    agents_as: Annotated[
        Literal["statefulset", "daemonset"],
        Meta(description="statefulset: so many agents; daemonset: one on each node that the selector takes."),
    ] = "statefulset"
    gateway: Annotated[bool, Meta(description="Serve the training API, too.")] = False
    storage: Annotated[str, Meta(description="Volume of the master's state.")] = "10Gi"
    storage_class: Annotated[str, Meta(description="Its class; else the default one.")] = ""

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        if amount("--storage", self.storage) < 1:
            yield f"--storage {self.storage} has to be above 0."
        if self.agents_as == "daemonset" and self.agents is not None:
            yield f"--agents {self.agents}: a DaemonSet has one agent each node; --node-selector says which."

    def _references(self) -> dict[str, str]:
        return {**super()._references(), "--storage-class": self.storage_class}


class RunOptions(PodOptions, frozen=True):
    command: Annotated[
        tuple[str, ...],
        Meta(description="What the driver runs, in the first pod, after --; else unified submit job.py."),
    ] = ("unified", "submit", "job.py")
    queue: Annotated[str, Meta(description="A LocalQueue of Kueue, which admits all pods at once.")] = ""
    retries: Annotated[int, Meta(description="Times that each pod may be killed, beyond evictions.")] = 3
    jobset: Annotated[
        bool, Meta(description="Print a JobSet instead of a Job; the cluster has to have its controller.")
    ] = False

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        if not self.num_agents:
            yield "--agents 0: a run needs one at least, on which its driver is."
        if not self.command:
            yield "no command: write what the driver runs after `--`, such as -- unified submit job.py."

    def _references(self) -> dict[str, str]:
        return {**super()._references(), "--queue": self.queue}

    def _numbers(self) -> list[tuple[str, int, int]]:
        return [*super()._numbers(), ("--retries", self.retries, 0)]


def _is_resource(name: str) -> bool:
    return "/" in name and _KEY.fullmatch(name) is not None


def amount(flag: str, text: str) -> int:
    """Return the bytes of a quantity such as ``64Gi``; UsageError: the text is no quantity."""
    found = _AMOUNT.fullmatch(text)
    if found is None:
        raise UsageError(f"{flag} {text!r} is no amount of memory: write it as Kubernetes does, such as 64Gi or 512Mi.")
    return int(float(found[1]) * _FACTORS[found[2] or ""])
