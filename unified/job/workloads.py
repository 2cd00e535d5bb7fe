"""Workloads: the code and the resources of each role of a job."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import (
    AliasChoices,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from unified.job import entrypoint
from unified.job.description import Description, Envs, PlainConfig, Seconds
from unified.job.enums import WorkloadEntrypointType
from unified.job.names import num_ports, parse_nnodes

RAY_KEEPS_DEVICES = "RAY_EXPERIMENTAL_NOSET_"
"""Prefix of variables in upstream's jobs whose workers see every device of their node."""


class ResourceDesc(Description):
    """Amounts that one worker needs. Zero means "does not matter"."""

    thing: ClassVar[str] = "resource"
    hint: ClassVar[str] = " A resource of your own goes into user_defined={name: amount}."

    cpu: float = Field(default=0.0, ge=0)
    """Cores."""
    memory: int = Field(default=0, ge=0, validation_alias=AliasChoices("memory", "mem"))
    """MB."""
    disk: int = Field(default=0, ge=0)
    """MB."""
    accelerator: float = Field(default=0.0, ge=0, validation_alias=AliasChoices("accelerator", "acc", "gpu"))
    """Devices; below 1 a share of one device, which roles in one collocation use together."""
    user_defined: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict, validation_alias=AliasChoices("user_defined", "ud_resource")
    )
    """Amounts of resources that nodes offer under your own names (``unified-agent --resources``)."""

    @classmethod
    def get_or_default(cls, resource: Mapping[str, Any]) -> ResourceDesc:
        """Return the resource described, with one accelerator if it asks for nothing to compute on."""
        return cls.model_validate(dict(resource)).or_one_accelerator()

    def is_empty(self) -> bool:
        """Return True if nothing to compute on is asked for: memory and disk alone do not run a worker."""
        return not (self.cpu or self.accelerator or any(self.user_defined.values()))

    def or_one_accelerator(self) -> ResourceDesc:
        """Return the same, or, if it is empty, one accelerator with the requested memory and disk."""
        if not self.is_empty():
            return self
        given = ResourceDesc(accelerator=1, memory=self.memory, disk=self.disk)
        given.model_fields_set.discard("accelerator")  # nobody has asked for it
        return given

    def __add__(self, other: ResourceDesc) -> ResourceDesc:
        names = {**self.user_defined, **other.user_defined}
        return ResourceDesc(
            cpu=self.cpu + other.cpu,
            memory=self.memory + other.memory,
            disk=self.disk + other.disk,
            accelerator=self.accelerator + other.accelerator,
            user_defined={name: self.user_defined.get(name, 0) + other.user_defined.get(name, 0) for name in names},
        )

    def __mul__(self, factor: float) -> ResourceDesc:
        return ResourceDesc(
            cpu=self.cpu * factor,
            memory=int(self.memory * factor),
            disk=int(self.disk * factor),
            accelerator=self.accelerator * factor,
            user_defined={name: amount * factor for name, amount in self.user_defined.items()},
        )


class NodeGroupFailoverDesc(Description):
    """Groups of nodes with the same label value. All nodes of a group are given up if the role does not run again."""

    thing: ClassVar[str] = "node group failover"

    enabled: bool = False
    group_label_key: str = Field(default="", validate_default=True)
    """Label of nodes whose value names their group, such as a rack."""
    timeout: Seconds = Field(default=300, ge=60)
    """Seconds for the role to run again after a node was lost or excluded, before the group of the node is given up."""

    @field_validator("group_label_key")
    @classmethod
    def _enabled_needs_a_label(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("enabled") and not value:
            raise ValueError("it is empty: name the label of nodes whose value is their group.")
        return value


class OutputFilesDesc(Description):
    """Files for the output of ranks, as torchrun has them. Streams are 1 stdout, 2 stderr, 3 both."""

    thing: ClassVar[str] = "output files"

    log_dir: str = ""
    """Folder on the workers' nodes; by default a new one in the folder for temporary files, if anything is written."""
    run_id: str = "none"
    """Name of the folder in it; a number is appended if the folder exists."""
    redirects: dict[int, Annotated[int, Field(ge=0, le=3)]] = Field(default_factory=dict)
    """Streams that go to files and are not shown, by local rank."""
    tee: dict[int, Annotated[int, Field(ge=0, le=3)]] = Field(default_factory=dict)
    """Streams that go to files and are shown, by local rank."""
    local_ranks: list[int] = Field(default_factory=list)
    """Local ranks whose output is shown; empty: all."""
    label: str = "default"
    """Word in front of lines of `tee`, before the local rank."""
    line_prefix: str = "[${role_name}${local_rank}]:"
    """Template of the text in front of lines of `tee`; it may have ${role_name}, ${rank}, ${local_rank}
    and ${hostname}, the worker's node."""


class BaseWorkloadDesc(Description):
    """Base of all workloads."""

    thing: ClassVar[str] = "workload"

    total: int = Field(default=1, ge=0, validation_alias=AliasChoices("total", "num", "number"))
    """Workers of the role. 0 is allowed if another role has workers: the role exists, without workers."""
    resource: ResourceDesc = Field(
        default_factory=ResourceDesc, validate_default=True, validation_alias=AliasChoices("resource", "res")
    )
    """Resources of each worker. Nothing, or only memory and disk, means one accelerator; in a job of CPUs, none."""
    envs: Envs = Field(default_factory=dict, validation_alias=AliasChoices("envs", "env", "environment"))
    """Environment of the role's workers, which overrides the job's own."""
    per_node_max_failure: int = Field(default=3, ge=0)
    """Failures of the role's workers on one node, above which the job excludes the node, unless it fits on no other."""
    max_restart: int = Field(default=10, ge=0)
    """Restarts of one worker, above which the job fails."""
    group: str | None = None
    """Roles with the same word share groups, so their workers land on one node together. Set by collocations."""
    per_group: int = Field(default=1, ge=1)
    """Workers of the role in one group, that is on one node."""
    entry_point: Any = Field(validation_alias=AliasChoices("entry_point", "entrypoint"))
    """Text: `module.attr`, `module::attr`, `file.py arguments`, `./path arguments`, `-m module arguments`; or a pair,
    `(module, attr)`. Or a function or class: it is sent by its name if workers can import it, and else with its
    code."""
    config: PlainConfig = Field(default_factory=dict)
    """Settings of the role alone: its workers read them as `current_worker().actor_info.spec.config`."""
    rank_based_gpu_selection: bool = False
    """True to let every worker see all devices of its group and take the one of its local rank."""
    is_driver: bool = True
    """True to let the job wait for this role. False suits roles that run until the drivers are done."""
    is_service: bool = False
    """True for a service: it answers calls until the job's other roles are done; if there are none, until the job is
    stopped. It restarts without the other roles. A class with `@rpc` methods and without `run()` is always a service,
    unless its role is elastic."""
    node_group_failover: NodeGroupFailoverDesc = Field(default_factory=NodeGroupFailoverDesc)
    """Groups of nodes that are given up together; not enabled by default."""
    hang_timeout: Seconds | None = Field(default=None, ge=0)
    """Seconds without progress after which an elastic role, or one worker of another role, is diagnosed, fails and is
    restarted; see Hangs. 0: never. None: for an elastic role the job's `hang_timeout`, for others never."""
    sub_stage: list[str] = Field(default_factory=list)
    auto_visible_devices: bool = True
    """True to let the worker see its own devices alone; False: every device of its node."""

    @model_validator(mode="before")
    @classmethod
    def _devices_that_ray_leaves_visible(cls, data: Any) -> Any:
        """Upstream writes `disable_ray_auto_visible_device` as variables that Ray reads."""
        if not isinstance(data, Mapping) or "auto_visible_devices" in data:
            return data
        envs: Any = next((data[name] for name in ("envs", "env", "environment") if data.get(name)), {})
        asks = isinstance(envs, Mapping) and any(str(name).startswith(RAY_KEEPS_DEVICES) for name in envs)
        return {**data, "auto_visible_devices": False} if asks else data

    @field_validator("node_group_failover", mode="before")
    @classmethod
    def _none_is_not_enabled(cls, value: Any) -> Any:
        return NodeGroupFailoverDesc() if value is None else value

    @field_validator("entry_point", mode="plain")
    @classmethod
    def _entry_point_has_a_form(cls, value: Any) -> Any:
        is_pair = isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(part, str) for part in value)
        found = entrypoint.normalized("::".join(value) if is_pair else value)
        num_ports([found] if isinstance(found, str) else [])
        return found

    @field_serializer("entry_point")
    def _entry_point_as_text(self, value: Any) -> str:
        return value if isinstance(value, str) else "::".join(entrypoint.name_of(value))

    @field_validator("resource")
    @classmethod
    def _empty_means_one_accelerator(cls, value: ResourceDesc) -> ResourceDesc:
        return value.or_one_accelerator()

    @model_validator(mode="after")
    def _numbers_fit(self) -> Self:
        if self.total % self.per_group:
            raise ValueError(
                f"total={self.total} is not divisible by per_group={self.per_group}: every group must be full."
            )
        if self.rank_based_gpu_selection and (self.per_group < 2 or self.resource.accelerator > 1):
            raise ValueError(
                f"rank_based_gpu_selection needs per_group above 1 (it is {self.per_group}) and at most one accelerator"
                f" a worker (it is {self.resource.accelerator:g})."
            )
        return self

    def without_default_device(self) -> Self:
        """Return the same without the default accelerator, which nobody asked for."""
        if self.resource.model_fields_set & {"accelerator"} or not self.resource.accelerator:
            return self
        return self.model_copy(update={"resource": self.resource.model_copy(update={"accelerator": 0.0})})

    @property
    def entry_point_type(self) -> WorkloadEntrypointType | None:
        """Form of the entry point."""
        if not isinstance(self.entry_point, str):
            return WorkloadEntrypointType.MODULE_FUNC
        return entrypoint.get_entrypoint_type(self.entry_point)


class ElasticWorkloadDesc(BaseWorkloadDesc):
    """Workers that train together under torch.distributed, and start a new round together after a loss.

    `nnodes` and `nproc_per_node` may be given instead of `total` and `per_group`: ``total = nnodes * nproc_per_node``.
    `nnodes` may be a range, ``"2:8"``: `total` is then for the *largest* number of nodes; each round has as many groups
    as fit on the available nodes.
    """

    input_names: ClassVar[frozenset[str]] = frozenset({"nnodes", "nproc_per_node"})

    backend: Literal["elastic"] = "elastic"
    comm_pre_check: bool = True
    """True to check the nodes' devices and links before the first round, and again after a failure that a node may
    have caused. Roles on one node are not checked: see Node check."""
    comm_auto_setup_process_group: bool = True
    """True to call `init_process_group` before the entry point and `destroy_process_group` after it."""
    comm_backend: str = "auto"
    """Backend: `auto` for nccl with CUDA, else gloo; or any name that torch takes."""
    comm_timeout_s: Seconds | None = Field(default=None, gt=0)
    """Timeout of the process group, in seconds; None: torch's own default."""
    comm_port: int = Field(default=0, ge=0, le=65535)
    """`MASTER_PORT` of every round; 0: any port that is free."""
    comm_run_id: str = ""
    """`TORCHELASTIC_RUN_ID` of every rank; empty: the job's id."""
    role_max_restart: int | None = Field(default=None, ge=0)
    """Restarts of the role as a whole, for any failed worker on any node, above which the job fails. If given, it
    alone limits the role's own failures: `per_node_max_failure` and the job's `job_max_restart` do not count them."""
    output_files: OutputFilesDesc | None = None
    """Files that torchrun's `--log-dir`, `--redirects` and `--tee` ask for."""
    min_nodes: int | None = Field(default=None, ge=1)
    max_nodes: int | None = Field(default=None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _nodes_become_workers(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not cls.input_names & data.keys():
            return data
        fields = dict(data)
        nnodes, nproc = fields.pop("nnodes", None), fields.pop("nproc_per_node", None)
        if nproc is not None:
            fields["per_group"] = _at_least_one("nproc_per_node", nproc)
        if nnodes is not None:
            low, high = parse_nnodes(nnodes)
            fields["total"] = high * _at_least_one("per_group", fields.get("per_group", 1))
            if low < high:
                fields.update(min_nodes=low, max_nodes=high)
        elif not {"total", "num", "number"} & fields.keys():
            fields["total"] = fields["per_group"]  # one node
        return fields


ENGINE = "unified.engine.worker.EngineWorker"
"""Entry point of a role with an engine."""


class IndependentWorkloadDesc(BaseWorkloadDesc):
    """Base of simple and custom workloads: their workers need not begin together."""

    restart_alone: bool = False
    """True if the workers do not need each other: a failed worker restarts alone, although `failover_exec_strategy`
    would restart its role (2) or the job (1)."""


class EngineDesc(Description):
    """An HTTP server that each worker of a role starts and watches."""

    thing: ClassVar[str] = "engine"

    command: list[str] = Field(min_length=1)
    """Program and arguments, or one text as for a shell, with ``{port}`` for the port that the server listens on."""
    ready: str = Field(default="/health", pattern="^/")
    """Path that the server answers with a status of 200 to 299 when it can work, from its start to its end."""
    start_timeout: Seconds = Field(default=1800.0, gt=0)
    """Seconds from the start of the server to the first such answer."""
    unhealthy_timeout: Seconds = Field(default=15.0, gt=0)
    """Seconds without such an answer after which the server has failed."""
    stall_timeout: Seconds = Field(default=120.0, ge=0)
    """Seconds in which vLLM or SGLang has open requests and makes no token, after which it has failed; 0: never."""

    @field_validator("command", mode="before")
    @classmethod
    def _words_of_a_text(cls, value: Any) -> Any:
        return shlex.split(value) if isinstance(value, str) else value

    @field_validator("command")
    @classmethod
    def _it_names_its_port(cls, value: list[str]) -> list[str]:
        if num_ports(value) == 0:
            raise ValueError("write {port} where the server is told its port: the agent holds one for each worker.")
        return value


class SimpleWorkloadDesc(IndependentWorkloadDesc):
    """Workers that run side by side; none waits for another unless their code does."""

    backend: Literal["simple"] = "simple"
    engine: EngineDesc | None = None
    """A server, in place of an entry point. The role is then a service, and its workers restart alone."""

    @model_validator(mode="before")
    @classmethod
    def _engine_is_a_service(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("engine") is None:
            return data
        if (entry_point := data.get("entry_point", ENGINE)) != ENGINE:
            raise ValueError(f"a role has an engine or an entry point ({entry_point}), not both.")
        return {"entry_point": ENGINE, "is_service": True, "restart_alone": True, **data}

    @field_validator("backend", mode="before")
    @classmethod
    def _none_is_simple(cls, value: Any) -> Any:
        return "simple" if value is None else value  # upstream's documents may have None


class CustomWorkloadDesc(IndependentWorkloadDesc):
    """A simple workload whose entry point is given as `module_name` and `class_name`."""

    input_names: ClassVar[frozenset[str]] = frozenset()

    backend: Literal["custom"] = "custom"
    module_name: str
    class_name: str
    entry_point: Any = Field(default="", validation_alias=AliasChoices("entry_point", "entrypoint"))

    @model_validator(mode="before")
    @classmethod
    def _class_is_the_entry_point(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and {"module_name", "class_name"} <= data.keys():
            rest = {key: value for key, value in data.items() if key not in ("entry_point", "entrypoint")}
            return {**rest, "entry_point": f"{data['module_name']}.{data['class_name']}"}
        return data


def _at_least_one(name: str, value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise ValueError(f"{name}={value!r} must be a whole number, at least 1.")
    return number


def _kind(value: Any) -> str | None:
    if isinstance(value, Mapping):
        return str(value.get("backend") or ("custom" if "class_name" in value else "simple"))
    return getattr(value, "backend", None)


WorkloadDesc: TypeAlias = Annotated[
    Annotated[ElasticWorkloadDesc, Tag("elastic")]
    | Annotated[SimpleWorkloadDesc, Tag("simple")]
    | Annotated[CustomWorkloadDesc, Tag("custom")],
    Discriminator(_kind),
]
"""Any workload; `backend` says which, by default custom if there is a `class_name`, else simple."""
