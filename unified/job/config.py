"""A job as users describe it: `DLConfig` says what runs, `JobConfig` how it is submitted."""

from __future__ import annotations

import argparse
import copy
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import (
    AliasChoices,
    Field,
    field_serializer,
    field_validator,
    model_validator,
)

from unified.errors import listed, nearest
from unified.job.description import Description, Envs, Seconds
from unified.job.enums import AcceleratorType, DLStreamType, DLType, MasterStateBackendType
from unified.job.job_info import JobInfo
from unified.job.names import MAX_NAME, check_job_name, check_modules
from unified.job.workloads import ResourceDesc, WorkloadDesc

_ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_SLACK = 1e-6  # sums of shares
_REMEDY = "A role that needs no accelerator says so with .resource(cpu=1)."


@dataclass
class WorkloadGroup:
    """Roles whose workers land on one node together."""

    name: str
    num: int
    """Number of such groups."""
    workloads: list[str]
    """Names of the roles."""
    resource: ResourceDesc
    """Resources of one group: the sum over its workers."""


class DLConfig(Description):
    """Description of a job. It is checked completely when it is built."""

    thing: ClassVar[str] = "job"

    user_config: Any = Field(default_factory=dict, validate_default=False)
    """Config that workers read as `current_worker().job_info.user_config`."""
    workloads: dict[str, WorkloadDesc]
    """Workloads by role."""
    global_envs: Envs = Field(default_factory=dict)
    node_number: int = Field(default=1, ge=1)
    accelerator_type: AcceleratorType = AcceleratorType.GPU
    device_per_node: int = Field(default=8, ge=1)
    """At most this many devices of one node are used."""
    may_share_nodes: bool = False
    """True to let groups share a node where there is no room on others: then up to `node_number * device_per_node`
    devices of one node are used."""
    dl_type: DLType = DLType.SFT
    stream_type: DLStreamType = DLStreamType.TASK_STREAM
    collocations: list[set[str]] = Field(default_factory=list)
    """Sets of roles that share groups and, in equal parts, devices."""
    restart_window: Seconds = Field(default=0.0, ge=0)
    """Default of the option `restart_window`."""
    preload: list[str] = Field(default_factory=list)
    """Modules that each node imports once, before it forks the job's workers; see `DLJobBuilder.preload`."""

    @field_validator("user_config", mode="plain")
    @classmethod
    def _mappings_become_a_config(cls, value: Any) -> Any:
        omegaconf = sys.modules.get("omegaconf")  # not imported here: that takes longer than all the rest
        if value is None or isinstance(value, dict | argparse.Namespace):
            return _resolved({} if value is None else vars(value) if isinstance(value, argparse.Namespace) else value)
        if omegaconf is not None and isinstance(value, omegaconf.DictConfig):
            return _resolved(value)
        return value

    @field_serializer("user_config")
    def _config_as_plain_data(self, value: Any) -> Any:
        omegaconf = sys.modules.get("omegaconf")
        if omegaconf is not None and isinstance(value, omegaconf.DictConfig):
            return omegaconf.OmegaConf.to_object(value)
        return value

    @field_validator("preload")
    @classmethod
    def _modules_have_names(cls, value: list[str]) -> list[str]:
        return check_modules(value)

    @field_validator("workloads")
    @classmethod
    def _there_are_roles_with_good_names(cls, value: dict[str, WorkloadDesc]) -> dict[str, WorkloadDesc]:
        if not value:
            raise ValueError("at least one workload must be defined: role(name).run(entry) or train(entry).")
        if not any(workload.total for workload in value.values()):
            raise ValueError("the job has no workers: total is 0 for each role. Give one of them a worker.")
        for role in value:
            if len(role) > MAX_NAME or not _ROLE.match(role):
                raise ValueError(
                    f"role name {role[:MAX_NAME]!r} is not allowed: at most {MAX_NAME} letters, digits and ._- only, "
                    f"beginning with a letter or digit."
                )
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.accelerator_type is AcceleratorType.CPU:
            self.workloads = {role: workload.without_default_device() for role, workload in self.workloads.items()}
        self._apply_collocations()
        if problems := list(self._problems()):
            raise ValueError("\n".join(problems))
        return self

    @property
    def workload_group(self) -> list[WorkloadGroup]:
        """Groups of workers; a role that is not collocated has its own."""
        members: dict[str, list[str]] = {}
        for role, workload in self.workloads.items():
            members.setdefault(workload.group or f"_group_{role}", []).append(role)
        return [self._group(name, roles) for name, roles in members.items()]

    def _group(self, name: str, roles: list[str]) -> WorkloadGroup:
        resource = ResourceDesc()
        for role in roles:
            workload = self.workloads[role]
            share = device_share(workload.resource.accelerator, len(roles))
            resource += workload.resource.model_copy(update={"accelerator": share}) * workload.per_group
        first = self.workloads[roles[0]]
        return WorkloadGroup(name=name, num=first.total // first.per_group, workloads=roles, resource=resource)

    def _apply_collocations(self) -> None:
        """Put the roles of each collocation into one group, with equal shares of devices. Idempotent."""
        self.collocations = [{self._defined(role) for role in collocation} for collocation in self.collocations]
        workloads = dict(self.workloads)
        for number, collocation in enumerate(self.collocations):
            if not collocation:
                raise ValueError("a collocation names no role.")
            name = f"collocation_{number}"
            for role in sorted(collocation):
                workload = workloads[role]
                if workload.group not in (None, name):
                    raise ValueError(
                        f"role {role!r} has already been assigned to {workload.group!r}, so it cannot be in the "
                        f"collocation {sorted(collocation)} too: a role is in one collocation only."
                    )
                share = workload.resource.model_copy(update={"accelerator": round(1 / len(collocation), 2)})
                workloads[role] = workload.model_copy(update={"group": name, "resource": share})
        self.workloads = workloads

    def _defined(self, role: str) -> str:
        """Return the role of this name, or the only one whose name differs in case alone."""
        if role in self.workloads:
            return role
        alike = [name for name in self.workloads if name.lower() == role.lower()]
        if len(alike) != 1:
            raise ValueError(
                f"role {role!r} is named in a collocation, and is not defined.{nearest(role, self.workloads)} "
                f"Roles: {listed(self.workloads)}."
            )
        return alike[0]

    def _problems(self) -> Iterator[str]:
        needed = 0.0
        for group in self.workload_group:
            counts = {role: self.workloads[role].total // self.workloads[role].per_group for role in group.workloads}
            if len(set(counts.values())) > 1:
                totals = listed(f"{role} makes {count}" for role, count in counts.items())
                yield (
                    f"roles {listed(counts)} are collocated, so each must make the same number of groups, "
                    f"total // per_group; {totals}."
                )
            if group.resource.accelerator > self.device_per_node + _SLACK:
                yield (
                    f"{_roles(group)} needs {group.resource.accelerator:g} accelerators on one node (per_group workers "
                    f"of each), but device_per_node is {self.device_per_node}: raise it. {_REMEDY}"
                )
            needed += group.resource.accelerator * group.num
        if needed > self.node_number * self.device_per_node + _SLACK:
            yield (
                f"all roles together ({listed(self.workloads)}) need {needed:g} accelerators (total times "
                f"accelerator of each), but there are node_num x device_per_node = {self.node_number} x "
                f"{self.device_per_node} = {self.node_number * self.device_per_node}: raise one of them. {_REMEDY}"
            )


class JobConfig(Description):
    """Options of a submission: all options of `DLJob.submit`."""

    thing: ClassVar[str] = "job configuration"

    job_name: str
    dl_config: DLConfig
    master: str | None = None
    """Address of the master, ``tcp://HOST:PORT``; None: the one of ``unified up``, if it runs. Otherwise, or
    with ``local``: a cluster of its own on this host, which ends with the job."""
    wait: bool = True
    """False: if the job does not fit now, fail at once instead of waiting in the queue."""
    master_cpu: float = Field(default=2, ge=0)
    """Cores reserved for the job's store host on its node, if given. The default reserves nothing, because the
    store host needs almost nothing, and there is none without an elastic role."""
    master_mem: int = Field(default=4096, ge=0, validation_alias=AliasChoices("master_mem", "master_memory"))
    """MB reserved for the store host, if given."""
    master_create_timeout: Seconds = Field(
        default=600.0, gt=0, validation_alias=AliasChoices("master_create_timeout", "timeout")
    )
    """Accepted for scripts of the reference API, without effect: here the master is there before the job."""
    node_max_restart: int = Field(default=10, ge=0)
    """Losses of one node, counted for each node alone, above which the job fails."""
    job_max_restart: int = Field(default=10, ge=0)
    """Restarts of the whole job, above which it fails."""
    master_max_restart: int = Field(default=10, ge=0)
    """Restarts of the master of the job's own cluster; its state is kept, and the job goes on. A supervisor restarts
    any other master: see Operations."""
    master_isolation_schedule_resource: str = ""
    """Resource or label (also as `key=value`) of the nodes that may run the job's store host, which takes 1 of the
    resource. Empty: any node. The store host does not count in `node_num`."""
    worker_isolation_schedule_resource: str = ""
    """Resource or label (also as `key=value`) of the nodes that workers may run on; each worker takes 1 of the
    resource. Empty: any node."""
    failover_trigger_strategy: Literal[0, 1, 2] = 2
    """Time at which a failed worker, a killed process or a lost node is acted on: 0 never, so the job fails, 1 when the
    other workers of the role are done, 2 now."""
    failover_exec_strategy: Literal[0, 1, 2] = 1
    """Action on such a failure: 0 stop the job, 1 restart the job, 2 restart the role. A simple role may say
    `restart_alone()`: then 1 and 2 restart the worker."""
    restart_window: Seconds | None = Field(default=None, ge=0)
    """Seconds for which a failure, a lost node or a restart of the job counts against its limit (of workers, of nodes
    and of the job), so that failures of weeks ago do not end a long job. After that time an excluded node is used
    again, too. 0: for ever. None: as in the job's description, by default 0."""
    restart_backoff: Seconds = Field(default=30.0, ge=0)
    """Longest wait, in seconds, before a worker that fails within a second each time starts again. The waits are 0,
    0.5, 1, 2, 4 … up to it."""
    hang_timeout: Seconds | None = Field(default=None, ge=0)
    """Seconds without progress after which an elastic role is diagnosed, fails and is restarted, unless the role says
    its own; see Hangs. None or 0: never."""
    master_state_backend_type: MasterStateBackendType = MasterStateBackendType.SQLITE
    """Accepted for scripts of the reference API, without effect: the master always keeps a SQLite file."""
    master_state_backend_config: dict[str, Any] = Field(default_factory=dict)
    """Accepted likewise, without effect."""
    stop_grace_s: Seconds = Field(default=10.0, ge=0)
    """Seconds from SIGTERM to SIGKILL when a worker is stopped."""
    save_grace_s: Seconds = Field(default=60.0, ge=0)
    """Further seconds, after `stop_grace_s`, that a stop or suspend gives a checkpoint that is being written."""
    call_timeout_s: Seconds | None = Field(default=None, gt=0)
    """Deadline, in seconds, of an rpc that names none; None: only the callee's death ends it."""
    python: str | None = None
    """Interpreter of the workers; None: the agent's own."""
    start_method: Literal["fork", "spawn"] = "fork"
    """`fork` starts a worker in milliseconds from a process that has torch loaded; `spawn` starts a new interpreter."""
    ship: bool | str | list[str] = False
    """Code that travels with the job: True for the working directory, a path for another folder, a list for files and
    folders in the working directory. Each node then has it as the workers' directory, which other jobs do not change;
    see Operations."""
    exclude: list[str] = Field(default_factory=list)
    """Patterns of files that do not travel, such as ``*.ckpt`` or ``data``, in addition to `.gitignore`."""
    requirements: str | list[str] = Field(default_factory=list)
    """Packages that the job needs besides those of the nodes: a list as for pip, or the path of a ``requirements.txt``
    or a ``uv.lock``. Each node installs them once, into a virtual environment of their own."""
    working_dir: str | None = None
    """Working directory of the workers, on all their nodes; None: `DLROVER_WORKING_DIR`, or else the driver's own."""
    report_to: str | list[str] = ""
    """Trackers that get the reports of rank 0 of each role: ``tensorboard:DIR``, ``mlflow[:URI]``, ``wandb[:PROJECT]``,
    ``trackio[:PROJECT]``, several separated by commas or as a list; see Observability."""

    def to_job_info(self) -> JobInfo:
        """Return the `JobInfo` of the job. Its `job_id` is its name: the master has not given it one yet."""
        return JobInfo(
            name=self.job_name,
            job_id=self.job_name,
            accelerator_type=self.dl_config.accelerator_type,
            user_config=self.dl_config.user_config,
        )

    @field_validator("ship", mode="before")
    @classmethod
    def _words_are_answers(cls, value: Any) -> Any:
        answers = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        return answers.get(value.lower(), value) if isinstance(value, str) else value  # from the environment

    @field_validator("job_name")
    @classmethod
    def _name_is_allowed(cls, value: str) -> str:
        return check_job_name(value)

    @field_validator("failover_trigger_strategy", "failover_exec_strategy", mode="before")
    @classmethod
    def _digits_are_numbers(cls, value: Any) -> Any:
        return int(value) if isinstance(value, str) and value.isdecimal() else value  # from the environment


def device_share(accelerator: float, num_roles: int) -> float:
    """Return the exact share behind a collocated role's rounded one: six roles of 0.17 share 1, not 1.02."""
    return min(accelerator, 1 / num_roles) if accelerator == round(1 / num_roles, 2) else accelerator


def _hidden_keys(value: Any, path: str = "") -> Iterator[str]:
    """Yield the keys of a config, also of the dicts in it, that are names of methods of DictConfig."""
    from omegaconf import DictConfig

    is_list = isinstance(value, list | tuple)
    for key, below in enumerate(value) if is_list else value.items() if isinstance(value, dict) else ():
        if isinstance(key, str) and hasattr(DictConfig, key):
            yield path + key
        yield from _hidden_keys(below, f"{path}{key}.")


def _resolved(value: Any) -> Any:
    """Return a new DictConfig without interpolations."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException, UnsupportedValueType

    if hidden := sorted(set(_hidden_keys(value))):
        raise ValueError(
            f"{listed(hidden)}: workers get a DictConfig, where config.{hidden[0]} is a method and not this value. "
            "Rename the key; or give OmegaConf.create(config), and read the value with [ ]."
        )
    try:
        config = copy.deepcopy(value) if isinstance(value, DictConfig) else DictConfig(value)
    except UnsupportedValueType:  # a Namespace may hold anything
        config = DictConfig(value, flags={"allow_objects": True})
    try:
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        raise ValueError(f"the config cannot be resolved: {error}") from None
    return config


def _roles(group: WorkloadGroup) -> str:
    names = listed(group.workloads)
    return f"role {names}" if len(group.workloads) == 1 else f"a group of roles {names}"
