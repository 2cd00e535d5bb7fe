"""Builders of one role each. A method that a builder lacks is looked up in its parent, so chains need no `end()`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeAlias, TypeVar

from unified.errors import JobError, nearest

ParentT = TypeVar("ParentT", covariant=True)
JobT = TypeVar("JobT", covariant=True)
EntryPoint: TypeAlias = str | tuple[str, str] | Callable[..., Any]
"""`module.attr`, `module::attr`, `file.py arguments` or `-m module arguments`; a pair, ``(module, attr)``; or a
function or class itself."""


class Builds(Protocol[JobT]):
    """Builder of a whole job."""

    def build(self) -> JobT: ...


class RoleBuilder(Generic[ParentT]):
    """Collects the description of one role. Only `build()` checks it; its errors name role and field."""

    backend = "simple"

    def __init__(self, parent: ParentT, role: str, entry_point: EntryPoint | None = None, **fields: Any) -> None:
        self.role_name = role
        self._parent = parent
        self._fields: dict[str, Any] = {"backend": self.backend, **fields}
        if entry_point is not None:
            self._fields["entry_point"] = entry_point

    def _set(self, **fields: Any) -> Self:
        self._fields.update(fields)
        return self

    def total(self, num: int = 1) -> Self:
        """Set how many workers the role has. 0 is allowed, if another role has workers."""
        return self._set(total=num)

    def per_group(self, num: int = 1) -> Self:
        """Set how many workers of the role share a group, and so a node."""
        return self._set(per_group=num)

    def env(self, env: Mapping[str, Any] | None = None) -> Self:
        """Add environment variables of this role's workers; they win over `global_env`."""
        return self._set(envs=merged(self._fields.get("envs"), env))

    def envs(self, env: Mapping[str, Any] | None = None) -> Self:
        """The same as `env`."""
        return self.env(env)

    def config(self, config: Mapping[str, Any] | Any = None) -> Self:
        """Set the config that this role's workers read as `current_worker().actor_info.spec.config`.

        The config is a dict, a DictConfig, an argparse.Namespace or None; the workers get a dict. The config of the
        whole job is given to the job's builder: before its first role, or after `end()`.
        """
        return self._set(config=config)

    def resource(
        self,
        cpu: float | Mapping[str, Any] = 0,
        memory: int = 0,
        disk: int = 0,
        accelerator: float = 0,
        **others: Any,
    ) -> Self:
        """Set the resources that each worker needs. A later call replaces an earlier one.

        A worker gets one accelerator if nothing, or only memory and disk, is asked for. In a job of
        ``device_type("CPU")`` it then gets none; ranks of an elastic role still spread over nodes, `device_per_node` on
        each.

        Args:
            cpu: cores; or all resources as one mapping.
            memory: MB (also ``mem``).
            disk: MB.
            accelerator: devices, or a share of one (also ``gpu``, ``acc``).
            others: the other names above, and ``user_defined={name: amount}``.
        """
        named: dict[str, Any] = {"memory": memory, "disk": disk, "accelerator": accelerator}
        given = dict(cpu) if isinstance(cpu, Mapping) else {"cpu": cpu}
        given.update({name: amount for name, amount in named.items() if amount != 0})
        return self._set(resource={**given, **others})

    def not_driver(self) -> Self:
        """Stop this role when the drivers are done: the job does not wait for it."""
        return self._set(is_driver=False)

    def service(self) -> Self:
        """Make the role a service: it answers calls until the job's other roles are done.

        If there are no other roles, it answers until the job is stopped. When its entry point has returned, its workers
        are SERVING. A worker that fails starts again alone (in an elastic role: with the role's other ranks). The
        failure counts against this role's limits. A class with `@rpc` methods and without `run()` is a service without
        this call, unless its role is elastic.
        """
        return self._set(is_service=True)

    def max_restart(self, num: int) -> Self:
        """Set how often one worker may restart before the job fails."""
        return self._set(max_restart=num)

    def per_node_max_failure(self, num: int) -> Self:
        """Set how often this role may fail on a node before the job excludes that node, unless it fits on no other."""
        return self._set(per_node_max_failure=num)

    def hang_timeout(self, seconds: float | timedelta) -> Self:
        """Set the time without progress after which the role is diagnosed, fails and is restarted.

        Progress is a report (`current_worker().report`), a collective or a call that goes on. The ranks of an elastic
        role are watched together, the workers of other roles one by one. Choose a time above the longest quiet phase: a
        first compilation, an evaluation, a checkpoint. 0: never.
        """
        return self._set(hang_timeout=seconds)

    def rank_based_gpu_selection(self) -> Self:
        """Let every worker see all devices of its group, and take the device of its local rank."""
        return self._set(rank_based_gpu_selection=True)

    def enable_node_group_failover(
        self, label_key: str | None = None, timeout: float | timedelta = 300, *, group_label_key: str | None = None
    ) -> Self:
        """Give up a whole group of nodes, such as a rack, if the role does not run again soon after one of them failed.

        The role runs again when all its workers are RUNNING after a node of it was lost or excluded. If that takes too
        long, and the job fits on other nodes, it leaves the group's nodes. It uses a node again once the node's agent
        was started anew, or the job's `restart_window` is over.

        Args:
            label_key: nodes with the same value of this label are a group (also ``group_label_key``).
            timeout: seconds that the role is given; at least 60.
        """
        key = one_of("enable_node_group_failover", label_key=label_key, group_label_key=group_label_key)
        return self._set(node_group_failover={"enabled": True, "group_label_key": key, "timeout": timeout})

    def disable_auto_visible_device(self) -> Self:
        """Let workers see every device of their node, not only their own."""
        return self._set(auto_visible_devices=False)

    def disable_ray_auto_visible_device(self) -> Self:
        """The same as `disable_auto_visible_device`, under the name of the reference API."""
        return self.disable_auto_visible_device()

    def sub_stage(self, sub_stage: Iterable[str] | None = None) -> Self:
        """Name the stages within this role's work."""
        return self._set(sub_stage=list(sub_stage or ()))

    def end(self) -> ParentT:
        """Return the job's builder. Only type checkers need it."""
        return self._parent

    def description(self) -> dict[str, Any]:
        """Return the description so far, as input of the workload models."""
        return dict(self._fields)

    if TYPE_CHECKING:  # the parent's methods that most chains call next; the others are Any

        def build(self: RoleBuilder[Builds[JobT]]) -> JobT: ...
        def role(self, role: str) -> ParentT: ...
        def train(self, entrypoint: EntryPoint, cls: str | None = None) -> ElasticRoleBuilder[ParentT]: ...
        def workload(self, role: str, entrypoint: EntryPoint, cls: str | None = None) -> SimpleRoleBuilder[ParentT]: ...

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            if name == "submit" or hasattr(type(self._parent), name):
                return getattr(self._parent, name)
            known = public_names(type(self)) | public_names(type(self._parent))
            has_not = f"neither {type(self).__name__} nor {type(self._parent).__name__} has {name!r}."
            raise AttributeError(has_not + nearest(name, known), name=name)  # with a name, Python adds no second hint
        raise AttributeError(f"{type(self).__name__} has no {name!r}.")


class SimpleRoleBuilder(RoleBuilder[ParentT]):
    """Builder of a role whose workers run side by side."""

    def restart_alone(self) -> Self:
        """Start a failed worker again alone, without its role or its job: the workers do not need each other."""
        return self._set(restart_alone=True)


class ElasticRoleBuilder(RoleBuilder[ParentT]):
    """Builder of a role whose workers train together under torch.distributed."""

    backend = "elastic"

    def total(self, num: int = 1) -> Self:
        """Set how many workers the role has, in place of `nnodes`."""
        self._fields.pop("nnodes", None)
        return super().total(num)

    def per_group(self, num: int = 1) -> Self:
        """Set how many workers share a node, in place of `nproc_per_node`."""
        self._fields.pop("nproc_per_node", None)
        return super().per_group(num)

    def nnodes(self, num: int | str) -> Self:
        """Set the number of groups of `nproc_per_node` workers: ``total = nnodes * nproc_per_node``, in either order.

        The workers of a group share a node. Groups go to different nodes, as many as the job may use (`node_num`). They
        share a node only if the other nodes have no room, and `unified explain` says so.

        With a range, ``"2:8"``, the role runs on as many nodes as the cluster has, within the range, and grows and
        shrinks with the cluster. Without a master the lower end counts, since there is only this host.
        """
        self._fields.pop("total", None)
        return self._set(nnodes=num)

    def nproc_per_node(self, num: int) -> Self:
        """Set how many workers a group has, all of them on one node."""
        self._fields.pop("per_group", None)
        return self._set(nproc_per_node=num)

    def role_max_restart(self, num: int) -> Self:
        """Set how often the role as a whole may restart, whichever worker failed: torchrun's `--max-restarts`.

        With it, no other limit counts the role's own failures.
        """
        return self._set(role_max_restart=num)

    def rendezvous(self, port: int = 0, run_id: str = "") -> Self:
        """Set the rendezvous variables of the ranks: torchrun's `--master-port` and `--rdzv-id`.

        Args:
            port: `MASTER_PORT`; 0: any free port. Two jobs on one node need different ports.
            run_id: `TORCHELASTIC_RUN_ID`; empty: the job's id.
        """
        return self._set(comm_port=port, comm_run_id=run_id)

    def output_files(self, log_dir: str = "", **options: Any) -> Self:
        """Write the output of each rank to its own files: torchrun's `--log-dir`, `--redirects`, `--tee`.

        Args:
            log_dir: ``LOG_DIR/RUN_ID/attempt_N/RANK/stdout.log`` and ``stderr.log``, on the nodes of the ranks.
            options: the other fields of `OutputFilesDesc`: ``run_id``, ``redirects``, ``tee``, ``local_ranks``,
                ``label``.
        """
        return self._set(output_files={"log_dir": log_dir, **options})

    def communication(self, backend: str = "auto", timeout: float | timedelta | None = None) -> Self:
        """Set the process group: `auto` is nccl with CUDA, else gloo. The timeout is in seconds; None is torch's."""
        return self._set(comm_backend=backend, comm_timeout_s=timeout)


def merged(old: Any, new: Any) -> Any:
    """Return two layers of environment as one. A value that is no mapping stays, so that `build()` refuses it."""
    if new is None:
        return old or {}
    return {**(old or {}), **new} if isinstance(new, Mapping) and isinstance(old, Mapping | None) else new


def entry_point_of(entrypoint: EntryPoint, cls: str | None) -> EntryPoint:
    """Return an entry point that may be given as two arguments, module and attribute. `build()` checks it."""
    return entrypoint if cls is None or not isinstance(entrypoint, str) else (entrypoint, cls)


def one_of(call: str, **names: Any) -> Any:
    """Return the value of an argument that has several names; JobError unless exactly one is used."""
    given = {name: value for name, value in names.items() if value is not None}
    if len(given) != 1:
        arguments = " and ".join(given) or " or ".join(names)
        raise JobError(f"{call}() " + (f"was given {arguments}: give one of them." if given else f"needs {arguments}."))
    return next(iter(given.values()))


def public_names(cls: type) -> set[str]:
    """Names that users may write after a dot."""
    return {name for name in dir(cls) if not name.startswith("_")}
