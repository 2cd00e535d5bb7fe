"""`DLJobBuilder`: describe a job in a chain of calls."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self, TypeVar

from unified import compat
from unified.api.builder.roles import (
    ElasticRoleBuilder,
    EntryPoint,
    RoleBuilder,
    SimpleRoleBuilder,
    entry_point_of,
    merged,
    one_of,
    public_names,
)
from unified.errors import JobError, UsageError, nearest

if TYPE_CHECKING:
    from unified.api.builder.dljob import DLJob

_log = logging.getLogger(__name__)

RoleT = TypeVar("RoleT", bound=RoleBuilder[Any])

ELASTIC_ROLE = "ELASTIC"
TRAINER_ROLE = "TRAINER"


class DLJobBuilder:
    """Describes a job: the settings of the job itself, and its roles.

    Nothing is checked before `build()`. The order of calls does not matter, except that `role(name)` comes before the
    `run` or `train` that it names.

        job = (
            DLJobBuilder()
            .node_num(2)
            .device_per_node(4)
            .config({"lr": 3e-4})
            .train("my_project.train.run").nnodes(2).nproc_per_node(4)
            .role("judge").run("my_project.judge.Judge").not_driver().resource(cpu=2)
            .build()
        )
        job.submit("my-job")
    """

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._roles: dict[str, RoleBuilder[Any]] = {}
        self._role: str | None = None
        self._collocations: list[set[str]] = []
        self._collocate_all_but: list[tuple[str, ...]] = []
        self._elastic_fields: dict[str, Any] = {}

    def _set(self, **fields: Any) -> Self:
        self._fields.update(fields)
        return self

    def node_num(self, num: int = 1) -> Self:
        """Set how many nodes the job's workers may use. The job waits while it does not fit on so many nodes."""
        return self._set(node_number=num)

    def device_per_node(self, num: int = 8) -> Self:
        """Set how many devices of each node the job may use."""
        return self._set(device_per_node=num)

    def may_share_nodes(self, may: bool = True) -> Self:
        """Let groups share a node beyond `device_per_node`, if other nodes have no room.

        The job then uses up to ``node_num * device_per_node`` devices of one node. Without this call it does not;
        `by_dlrover_run_cmd` and ``unified run`` allow it.
        """
        return self._set(may_share_nodes=may)

    def device_type(self, device_type: str = "GPU") -> Self:
        """Set the kind of devices: ``"GPU"``, ``"CPU"`` or ``"TPU"``."""
        return self._set(accelerator_type=device_type)

    def config(self, config: Any = None) -> Self:
        """Set what workers read as `current_worker().job_info.user_config`.

        A dict, a DictConfig, an argparse.Namespace or None becomes a resolved DictConfig; anything else stays as it is.
        `build()` refuses a dict or Namespace with a key, at any depth, that is a method of DictConfig, such as
        ``items``, ``values`` or ``copy``: ``config.items`` would be the method.
        """
        return self._set(user_config=config)

    def restart_window(self, seconds: float | timedelta) -> Self:
        """Set for how many seconds a failure, a lost node or a restart counts against the job's limits.

        The option `restart_window` of `submit` wins over it.
        """
        return self._set(restart_window=seconds)

    def global_env(self, env: Mapping[str, Any] | None = None) -> Self:
        """Add environment variables of all workers; those of a role win over them."""
        return self._set(global_envs=merged(self._fields.get("global_envs"), env))

    def preload(self, *modules: str) -> Self:
        """Have each node import these modules once, before it forks the job's workers, which then need not import them.

        Repeated calls add. Packages that import their parts when these are used need the names of the parts:
        ``preload("transformers.Trainer", "trl.GRPOTrainer")``. The modules are installed ones, not files of the job. A
        module that cannot be imported, or prevents a fork, is named in the workers' output. See Operations (*Preload*).
        """
        return self._set(preload=[*self._fields.get("preload", []), *modules])

    def dl_type(self, dl_type: str = "SFT") -> Self:
        """Set the kind of the job, for people only: ``"PRE"``, ``"SFT"``, ``"RL"`` or ``"MULTIMODAL"``."""
        return self._set(dl_type=dl_type)

    def as_task_stream(self) -> Self:
        """Let the roles' own code drive the job: the default."""
        return self._set(stream_type="TASK_STREAM")

    def as_data_stream(self) -> Self:
        """Let the data that flows between roles drive the job."""
        return self._set(stream_type="DATA_STREAM")

    def role(self, role: str) -> Self:
        """Name the role that the next `run` or `train` describes."""
        self._role = role
        return self

    def run(self, entrypoint: EntryPoint, cls: str | None = None) -> SimpleRoleBuilder[Self]:
        """Add a simple workload under the name given to `role`: workers that run side by side.

        Args:
            entrypoint: a function or class, or its name: `module.attr`, `module::attr`; `file.py arguments` or
                `-m module arguments`; or a pair, ``(module, attr)``. If workers can import an object, only its name is
                sent. For a closure, or an object of ``__main__`` or of a notebook's cell, the code is sent.
            cls: the attribute, if `entrypoint` is only a module.
        """
        if self._role is None:
            raise JobError("run() does not know which role it describes: call role(name) before it.")
        return self._add(SimpleRoleBuilder(self, self._role, entry_point_of(entrypoint, cls)))

    def engine(
        self, command: str | Sequence[str], *, ready: str = "/health", **options: float | timedelta
    ) -> SimpleRoleBuilder[Self]:
        """Add a role whose workers each run an HTTP server, under the name given to `role`: vLLM, SGLang, any other.

            builder.role("rollout").engine("vllm serve my/model --port {port}").total(2).resource(accelerator=1)

        A worker is SERVING once the server is ready, and watches it. A server that ends, or is not well, fails its
        worker, which starts again alone. `RoleGroup("rollout").urls()` has the addresses. See Engines.

        Args:
            command: program and arguments, one text as for a shell, or a list. ``{port}`` becomes the port that the
                agent holds for the worker. vLLM and SGLang get ``--host 127.0.0.1`` unless the command has a host.
            ready: path that the server answers with a status of 200 to 299 when it can work.
            options: seconds: ``start_timeout`` (1800) from the start to the first such answer, ``unhealthy_timeout``
                (15) without one afterwards, and ``stall_timeout`` (120; 0: never) in which vLLM or SGLang has open
                requests and makes no token.
        """
        if self._role is None:
            raise JobError("engine() does not know which role it describes: call role(name) before it.")
        return self._add(SimpleRoleBuilder(self, self._role, engine={"command": command, "ready": ready, **options}))

    def workload(self, role: str, entrypoint: EntryPoint, cls: str | None = None) -> SimpleRoleBuilder[Self]:
        """`role(role).run(entrypoint)` in one call."""
        return self.role(role).run(entrypoint, cls)

    def train(self, entrypoint: EntryPoint, cls: str | None = None) -> ElasticRoleBuilder[Self]:
        """Add an elastic workload, under the name given to `role` or as ``ELASTIC``: workers that train together.

        Args:
            entrypoint: as for `run`.
            cls: as for `run`.
        """
        return self._add(ElasticRoleBuilder(self, self._role or ELASTIC_ROLE, entry_point_of(entrypoint, cls)))

    def trainer(
        self, module: EntryPoint | None = None, cls: str | None = None, *, entrypoint: EntryPoint | None = None
    ) -> SimpleRoleBuilder[Self]:
        """Add a simple workload ``TRAINER``.

        Args:
            module: an entry point, as for `run`, or only its module (also ``entrypoint``).
            cls: the attribute, if `module` is only a module.
        """
        return self.role(TRAINER_ROLE).run(one_of("trainer", module=module, entrypoint=entrypoint), cls)

    def with_collocation(self, *roles: str) -> Self:
        """Put these roles' groups on one node, where they share devices in equal parts.

        If no role has exactly the name that is given, case does not matter.
        """
        self._collocations.append(set(roles))
        return self

    def with_collocation_all(self, *exclude_roles: str) -> Self:
        """Collocate all roles of the job except these, also roles that the chain describes later."""
        self._collocate_all_but.append(exclude_roles)
        return self

    def no_setup_process_group(self) -> Self:
        """Leave `init_process_group` to the entry points of elastic roles. By default their call replaces the group."""
        self._elastic_fields["comm_auto_setup_process_group"] = False
        return self

    def skip_node_check(self) -> Self:
        """Start training without a check of the nodes' devices and links."""
        self._elastic_fields["comm_pre_check"] = False
        return self

    def by_dlrover_run_cmd(self, cmd: str) -> Self:
        """Describe an elastic role by a command line of `torchrun` or `dlrover-run`.

        Sets nodes, workers per node, the entry point with its arguments, `--max-restarts`, `--rdzv-id` and
        `--master-port`. Options for what the master does here (rendezvous, addresses) are ignored and reported in the
        log. A script of `torchrun` sets up its process group itself. For a script of `dlrover-run` the runtime does it,
        and without `--max-restarts` the usual limits of a role hold.

        Raises:
            JobError: (a ValueError) another launcher, an option that does not exist, or `--node-rank`
                above 0: a job is submitted once, for all its nodes.
            MasterUnreachableError: `--nproc-per-node` is to be counted in the cluster of ``UNIFIED_MASTER``, and no
                master answers there.
        """
        from unified.api.builder import launcher

        try:
            launcher.apply_command(self, cmd)
        except UsageError as error:
            raise JobError(str(error)) from None
        return self

    def description(self) -> dict[str, Any]:
        """Return the description so far, as input of `DLJob`."""
        workloads = {}
        for name, role in self._roles.items():
            extra = self._elastic_fields if isinstance(role, ElasticRoleBuilder) else {}
            workloads[name] = {**role.description(), **extra}
        collocations = [*self._collocations, *map(self._all_but, self._collocate_all_but)]
        return {**self._fields, "workloads": workloads, "collocations": collocations}

    def build(self) -> DLJob:
        """Check everything and return the job.

        Raises:
            JobError: (also a `pydantic.ValidationError`) something is wrong; it names the role and the field.
        """
        from unified.api.builder.dljob import DLJob

        self._warn_of_misplaced_config()
        return DLJob.model_validate(self.description())

    def _warn_of_misplaced_config(self) -> None:
        """Warn of a role's config that may be meant for the job: upstream's roles have no config of their own."""
        roles = [name for name, role in self._roles.items() if "config" in role.description()]
        if roles and "user_config" not in self._fields and compat.is_installed():
            _log.warning(
                "the config is that of role %s alone, and the job has none. If it is meant for the job, "
                "give it before the first role, or after end().",
                " and ".join(roles),
            )

    def _all_but(self, exclude: tuple[str, ...]) -> set[str]:
        """Return all roles except these. An unknown name is returned, too, so that `build()` refuses it."""
        left_out = {name.lower() for name in exclude}
        unknown = left_out - {role.lower() for role in self._roles}
        roles = {role for role in self._roles if role.lower() not in left_out}
        return roles | {name for name in exclude if name.lower() in unknown}

    def _add(self, role: RoleT) -> RoleT:
        if role.role_name in self._roles:
            raise JobError(f"role {role.role_name!r} is already defined: each role is described once.")
        self._roles[role.role_name] = role
        self._role = None
        return role

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no {name!r}.")
        if hasattr(ElasticRoleBuilder, name):
            raise AttributeError(
                f"{type(self).__name__} has no {name!r}: it is said of a role, after run(), train() or workload()."
            )
        has_not, hint = f"{type(self).__name__} has no {name!r}.", nearest(name, public_names(type(self)))
        if name == "submit":
            hint = " Call build() first, which returns the job: builder.build().submit(…)."
        raise AttributeError(has_not + hint, name=name)  # with a name, Python adds no second hint
