"""A job as the daemons see it: plain frozen values, checked when decoded.

Users write pydantic models (`unified.job.config`, `unified.job.workloads`); `submit` turns them into
these records, which travel to the master, are kept in its store and are sent to agents. Values that only
the job's own workers may decode are a `Blob`: the daemons carry it and never look inside.

An elastic role may name a range of nodes: its `total` and its workers' names are for the largest number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from unified.errors import UsageError, nearest
from unified.values import Value

if TYPE_CHECKING:
    Bytes = bytes | memoryview
else:
    Bytes = memoryview  # so that the decoder makes views of its input, and no copies


class Blob(Value, frozen=True, kw_only=True):
    """Bytes that only the job's own workers decode."""

    codec: Literal["none", "msgpack", "omegaconf", "pickle"] = "none"
    """Codec: `msgpack`: plain data. `omegaconf`: plain data that becomes a DictConfig. `pickle`: anything else."""
    data: Bytes = b""

    def __repr__(self) -> str:
        return f"Blob({self.codec}, {len(self.data)} bytes)"


class Resources(Value, frozen=True, kw_only=True):
    """Amounts that one worker needs, or that a node has. Zero means "does not matter"."""

    cpu: float = 0.0
    memory_mb: float = 0.0
    disk_mb: float = 0.0
    accelerator: float = 0.0
    """Devices; below 1 a share of one device, so that collocated workers can use it together."""
    user_defined: dict[str, float] = {}


class EntryPoint(Value, frozen=True, kw_only=True):
    """Code that a worker runs."""

    kind: Literal["attribute", "script", "module", "value", "program"]
    """`attribute`: a function or class that can be imported. `value`: one that cannot, with its code. `script`: a file,
    or a folder or zip file with a `__main__.py`, as `__main__`. `module`: as `python -m`. `program`: any program."""
    target: str
    """Module path for `attribute`, `value` and `module`, file path for `script`, path or name for `program`."""
    attribute: str = ""
    argv: list[str] = []
    code: Blob = Blob()
    """Cloudpickle of the function or class (`value`)."""


class Communication(Value, frozen=True, kw_only=True):
    """torch.distributed set-up of an elastic role."""

    pre_check: bool = True
    auto_setup: bool = True
    backend: str = "auto"
    timeout_s: float | None = None
    port: int = 0
    """Port of each round's store, on the store host's node; 0: any that is free."""
    run_id: str = ""
    """Value of ``TORCHELASTIC_RUN_ID``; empty: the job's id."""


class OutputFiles(Value, frozen=True, kw_only=True):
    """Files of a role's output, and the part that the driver shows: torchrun's `--log-dir`,
    `--redirects`, `--tee` and `--local-ranks-filter`. Streams are torchrun's numbers: 1 stdout, 2 stderr, 3 both.
    """

    log_dir: str = ""
    """Absolute path on the workers' nodes. Empty: the submitter makes one, if a stream is to be written at all."""
    run_id: str = "none"
    """Name of the folder in it."""
    redirects: dict[int, int] = {}
    """Streams that are written and not shown, by local rank."""
    tee: dict[int, int] = {}
    """Streams that are written and shown, by local rank; each line has ``[default1]:`` in front."""
    local_ranks: list[int] = []
    """Local ranks that are shown; empty: all."""
    label: str = "default"
    """Word before the local rank in front of each line of `tee`."""
    line_prefix: str = "[${role_name}${local_rank}]:"
    """Template of the text in front of each line of `tee`."""

    @property
    def is_written(self) -> bool:
        """True if there are any files."""
        return bool(self.log_dir or self.redirects or self.tee)

    def file(self, stream: Literal["out", "err"], *, rank: int, local_rank: int, attempt: int) -> str:
        """Return the path of one stream's file; empty if it has none. `log_dir` alone means files for all streams."""
        is_chosen = stream_bits(stream) & (self.redirects.get(local_rank, 0) | self.tee.get(local_rank, 0))
        if not self.log_dir or not (is_chosen or not (self.redirects or self.tee)):
            return ""
        return f"{self.log_dir}/{self.run_id}/attempt_{attempt}/{rank}/std{stream}.log"

    def is_teed(self, stream: Literal["out", "err"], local_rank: int) -> bool:
        return bool(self.tee.get(local_rank, 0) & stream_bits(stream))

    def is_shown(self, stream: Literal["out", "err"], local_rank: int) -> bool:
        if self.local_ranks and local_rank not in self.local_ranks:
            return False
        return self.is_teed(stream, local_rank) or not self.redirects.get(local_rank, 0) & stream_bits(stream)


def stream_bits(stream: Literal["out", "err"]) -> int:
    """Return torchrun's number of a stream."""
    return 1 if stream == "out" else 2


class EngineOptions(Value, frozen=True, kw_only=True):
    """An HTTP server that each worker of a role starts and watches. See `DLJobBuilder.engine`."""

    command: list[str]
    """Program and arguments, with `{port}` for the port that the server listens on."""
    ready: str = "/health"
    start_timeout: float = 1800.0
    unhealthy_timeout: float = 15.0
    stall_timeout: float = 120.0


class WorkerPlace(Value, frozen=True, kw_only=True):
    """Ranks of a worker in its role and in its group."""

    rank: int = 0
    """In the role, from 0."""
    world_size: int = 1
    """Number of workers of the role."""
    local_rank: int = 0
    """In the group, from 0."""
    local_world_size: int = 1
    """Number of workers of the group."""
    node_rank: int = 0
    """Rank of the group in the role."""


class RoleSpec(Value, frozen=True, kw_only=True):
    """A role: equal workers with one entry point."""

    name: str
    kind: Literal["simple", "elastic", "custom"]
    entry_point: EntryPoint
    total: int = 1
    per_group: int = 1
    collocation: str | None = None
    """Roles with the same word here share groups: group i holds the i-th `per_group` workers of each."""
    resources: Resources = Resources()
    envs: dict[str, str] = {}
    """Environment, already merged: the job's global one below the role's own."""
    config: Blob = Blob()
    is_driver: bool = True
    is_service: bool = False
    """True if the user says that it is a service. If its class has only `@rpc` methods, workers find out themselves."""
    max_restart: int = 10
    role_max_restart: int | None = None
    """Restarts of the role as a whole, for any failed worker. If given, no other limit counts the role's own
    failures."""
    per_node_max_failure: int = 3
    restart_alone: bool = False
    """True to restart a failed worker alone, unless the job's strategies forbid any restart. Not for elastic roles."""
    hang_timeout_s: float | None = None
    """Time without progress after which the role (elastic) or the worker (else) has failed; None: never."""
    rank_based_gpu_selection: bool = False
    auto_visible_devices: bool = True
    communication: Communication = Communication()
    output_files: OutputFiles | None = None
    engine: EngineOptions | None = None
    """None: the worker runs the entry point alone."""
    min_nodes: int | None = None
    max_nodes: int | None = None
    failover_label: str | None = None
    """Label of nodes that fail together: those with the same value are a group."""
    failover_timeout_s: float = 300.0
    """Seconds from the loss or exclusion of a node until the job gives up its group, unless the role runs then."""
    sub_stage: list[str] = []

    @property
    def limits(self) -> dict[str, int]:
        """Limits that count its own failures, by name."""
        if self.role_max_restart is not None:
            return {"role_max_restart": self.role_max_restart}
        return {"max_restart": self.max_restart, "per_node_max_failure": self.per_node_max_failure}

    @property
    def num_groups(self) -> int:
        return self.total // self.per_group

    @property
    def min_groups(self) -> int:
        """Least number of groups that the role runs with."""
        return (self.min_nodes or 1) if has_range(self) else self.num_groups

    def worker(self, rank: int) -> str:
        """Return a worker's name, ``{role}_{total}-{rank}_{per_group}-{local_rank}``, as in ``trainer_4-2_2-0``."""
        return f"{self.name}_{self.total}-{rank}_{self.per_group}-{rank % self.per_group}"

    def place(self, rank: int) -> WorkerPlace:
        """Return the ranks of a worker in the whole role."""
        node_rank, local_rank = divmod(rank, self.per_group)
        return WorkerPlace(
            rank=rank,
            world_size=self.total,
            local_rank=local_rank,
            local_world_size=self.per_group,
            node_rank=node_rank,
        )

    @property
    def workers(self) -> list[str]:
        """Return the full names of all workers, by rank."""
        return [self.worker(rank) for rank in range(self.total)]


class DriverProcess(Value, frozen=True, kw_only=True):
    """The process that submits a job and waits for it."""

    pid: int
    pid_space: str
    """Process id space of the driver, as `unified.config.settings.pid_space` names it there."""


Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
"""SHA-256 in hexadecimal."""


class ShippedCode(Value, frozen=True, kw_only=True):
    """Code that travels with a job: an archive of a folder of its submitter, which the master keeps."""

    digest: Digest
    size: int
    """Bytes of the archive."""
    root: str
    """Absolute path of the folder on the submitter's host."""


class JobSpec(Value, frozen=True, kw_only=True):
    """A whole job, as submitted."""

    name: str
    roles: list[RoleSpec]
    node_num: int = 1
    """Most nodes of the job's workers."""
    device_per_node: int = 8
    """Devices of one node that the job uses, at most, unless its groups may share nodes."""
    may_share_nodes: bool = False
    """True to let groups share a node where there is no room on others."""
    accelerator_type: Literal["GPU", "CPU", "TPU"] = "GPU"
    dl_type: str = "SFT"
    stream_type: str = "TASK_STREAM"
    user_config: Blob = Blob()
    node_max_restart: int = 10
    job_max_restart: int = 10
    master_max_restart: int = 10
    master_cpu: float = 0
    """Cores reserved for the job's store host on its node."""
    master_memory_mb: float = 0
    """Memory reserved for the job's store host on its node."""
    master_isolation_resource: str = ""
    """A resource (of which it takes 1), a label, or ``label=value``, that the node of its store host must have."""
    worker_isolation_resource: str = ""
    """Likewise for the nodes of the workers; each worker takes 1 of a resource."""
    failover_trigger: Literal[0, 1, 2] = 2
    """0 never, 1 when the other workers of the role are done, 2 now."""
    failover_exec: Literal[0, 1, 2] = 1
    """0 stop the job, 1 restart the job, 2 restart the role."""
    restart_window_s: float = 0.0
    """Age, in seconds, at which a failure, a lost node or a restart counts no more; 0: each counts for ever."""
    restart_backoff_s: float = 30.0
    """Longest wait before a restart of a worker that always fails at once."""
    stop_grace_s: float = 10.0
    """Seconds between SIGTERM and SIGKILL."""
    save_grace_s: float = 60.0
    """Further seconds, at a planned stop, for a checkpoint that is being written."""
    call_timeout_s: float | None = None
    """Deadline of an rpc that names none; None: only the callee's death ends it."""
    python: str | None = None
    """Interpreter of the workers; None means the agent's own."""
    start_method: Literal["fork", "spawn"] = "fork"
    preload: list[str] = []
    """Modules that a node imports once, before it forks the job's workers."""
    working_dir: str | None = None
    code: ShippedCode | None = None
    """Code that travels with the job; None: each node has it at the submitter's path."""
    requirements: list[str] = []
    """Packages that are installed on each node for the job, besides those of the agent's interpreter; lines for pip."""
    sys_path: list[str] = []
    """Paths in front of the workers' `sys.path`, where they exist on the node."""
    submitted_by: str = ""
    """user@host:pid of the driver, for people."""
    is_output_followed: bool = False
    """True if the driver writes all output of workers to a file or a pipe: logs are rotated after it has read them."""
    labels: dict[str, str] = {}
    """Labels by which clients select jobs; nothing else reads them."""
    annotations: dict[str, str] = {}
    """Notes of the submitter, which are kept with the job and shown with its status."""
    stdin: DriverProcess | None = None
    """Process whose stdin rank 0 of the first role reads if it is on that host; all other workers read nothing."""

    @property
    def device_cap(self) -> int:
        """Most devices of one node that the job uses."""
        return self.device_per_node * (self.node_num if self.may_share_nodes else 1)

    def role(self, name: str) -> RoleSpec:
        """Return the role of this name; KeyError if there is none."""
        if len(self.roles) > FEW_ROLES:
            return _by_name(self.roles)[name]
        for role in self.roles:
            if role.name == name:
                return role
        raise KeyError(name)


SLURM_GROUPS = "UNIFIED_SLURM_GROUPS"
"""Variable with the component of a heterogeneous SLURM job by role, as JSON, without the roles in component 0."""
HET_RESOURCE = "slurm_het_group_"
"""Prefix of a resource of the nodes in one component of a heterogeneous SLURM job; the number follows."""
ENDS_AT = "UNIFIED_ALLOCATION_ENDS_AT"
"""Variable with the time at which the allocation of a worker's node ends, in seconds since 1970; empty: never."""
LOOPBACK = "127.0.0.1"
"""Address of the stores of a job whose ranks are all on one host."""
FEW_ROLES = 16
"""Up to this many roles a linear search is as fast as an index."""
_indexes: dict[int, tuple[list[RoleSpec], dict[str, RoleSpec]]] = {}
"""Roles by name, for recent jobs that have many roles. The key is the id of the list of roles, which stays as it is."""
_MAX_INDEXES = 64


def _by_name(roles: list[RoleSpec]) -> dict[str, RoleSpec]:
    known = _indexes.get(id(roles))
    if known is None:
        if len(_indexes) >= _MAX_INDEXES:
            _indexes.clear()
        known = _indexes[id(roles)] = (roles, {role.name: role for role in roles})
    return known[1]


def has_placed_store(spec: JobSpec) -> bool:
    """Return True if the job says where its store host goes, or what it needs; else it goes with the first rank."""
    return bool(spec.master_isolation_resource) or spec.master_cpu > 0 or spec.master_memory_mb > 0


def is_on_one_host(spec: JobSpec) -> bool:
    """Return True if the workers of the job and its store host are all on one host, at all times."""
    return spec.node_num == 1 and not has_placed_store(spec)


def has_range(role: RoleSpec) -> bool:
    """Return True if the role gives a range for its number of nodes instead of one number."""
    return role.min_nodes is not None and role.max_nodes is not None and role.min_nodes < role.max_nodes


def with_nodes(spec: JobSpec, num_nodes: int) -> JobSpec:
    """Return the job on this number of nodes: each range of nodes becomes the nearest number within it."""
    roles = []
    for role in spec.roles:
        number = max(role.min_nodes or 1, min(num_nodes, role.max_nodes or 1))
        total = number * role.per_group if has_range(role) else role.total
        roles.append(msgspec.structs.replace(role, total=total))
    if roles == spec.roles:
        return spec
    only = roles[0] if len(roles) == 1 else None
    node_num = min(spec.node_num, only.num_groups) if only else spec.node_num
    return msgspec.structs.replace(spec, roles=roles, node_num=node_num)


def in_groups(spec: JobSpec, groups: Mapping[str, int]) -> JobSpec:
    """Return the job with each role on nodes of its component of a heterogeneous SLURM job; default: component 0.

    UsageError: the job has no role of that name.
    """
    known = [role.name for role in spec.roles]
    if unknown := sorted(groups.keys() - set(known)):
        raise UsageError(f"the job has no role {unknown[0]!r} to be put into a group.{nearest(unknown[0], known)}")
    roles = []
    for role in spec.roles:
        wanted = {**role.resources.user_defined, f"{HET_RESOURCE}{groups.get(role.name, 0)}": 1.0}
        resources = msgspec.structs.replace(role.resources, user_defined=wanted)
        roles.append(msgspec.structs.replace(role, resources=resources))
    return msgspec.structs.replace(spec, roles=roles)
