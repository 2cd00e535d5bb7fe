"""`current_worker()`: the identity of this process, its job's configuration, and its stop."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from unified.errors import NotInWorkerError, UsageError
from unified.job.job_info import JobInfo
from unified.job.names import MAX_PORTS
from unified.job.spec import ENDS_AT, JobSpec, RoleSpec, has_range
from unified.protocol.agent_master import RoundNotice, RunOrder
from unified.protocol.records import NameClaims
from unified.protocol.worker_agent import Launch
from unified.worker.names import Names
from unified.worker.progress import Reporter
from unified.worker.stop import StopState

if TYPE_CHECKING:
    from unified.bus.endpoint import BusEndpoint
    from unified.job.workloads import WorkloadDesc
    from unified.rounds.snapshot_agreement import RoundPlace
    from unified.snapshot.worker.snapshots import Restored, Snapshots
    from unified.worker.rounds import Rounds


@dataclass(frozen=True, kw_only=True)
class ActorInfo:
    """One worker of the job."""

    name: str
    """Full name: ``{role}_{world_size}-{rank}_{local_world_size}-{local_rank}``."""
    role: str
    rank: int
    """In the role, from 0."""
    world_size: int
    local_rank: int
    """Rank in its group."""
    local_world_size: int
    node_rank: int
    """Rank of its group in the role."""
    node: str = ""
    """Id of the node it runs on; empty while that is not known here."""
    sub_master: str | None = None
    """``"elastic"`` for a role that trains together, else None."""
    role_spec: RoleSpec = field(repr=False)
    """Specification of the role, as the daemons have it."""

    @cached_property
    def spec(self) -> WorkloadDesc:
        """The workload that describes the role: `backend`, `resource`, `group`, `total`, … as the job has them.

        The `config` is decoded, and the `envs` hold the job's own environment too. Built at first use.
        """
        from unified.job.from_spec import workload_of  # loads pydantic, which most workers do without

        return workload_of(self.role_spec)


class Worker:
    """The worker that this process is, for its own code. Made by the runtime; read it through `current_worker()`."""

    def __init__(
        self,
        launch: Launch,
        *,
        stop: StopState,
        reporter: Reporter,
        bus: BusEndpoint,
        device: str,
        rounds: Rounds | None = None,
        claim: Callable[[NameClaims], None] = lambda claims: None,
        hold_ports: Callable[[int], list[int]] | None = None,
    ) -> None:
        self._launch = launch
        self._spec: JobSpec = launch.spec
        self._stop = stop
        self._reporter = reporter
        self._ports = launch.ports
        self._hold_ports = hold_ports
        self._pid = os.getpid()
        self._finishers: list[Callable[[], None]] = []
        from unified.worker.rounds import (
            RoundChanges,  # not at the top: drivers import this module, too, and need none of it
        )

        self._changes = RoundChanges(rounds)
        self.rounds = rounds
        """Rounds of this process, for elastic loops; None in a test that needs none."""
        self.bus = bus
        """The endpoint of this worker on the bus."""
        self.names = Names(
            job_id=launch.job_id,
            worker=launch.name,
            incarnation=launch.incarnation,
            directory=bus.directory,
            say=claim,
        )
        """Names that workers of the job claim, and who holds them."""
        self.incarnation = launch.incarnation
        """Number of this incarnation of the worker, from 0."""
        self.round = 0
        """The elastic round it runs in; 0 before the order to run."""
        self.device = device
        """Device by torch's name: ``cuda:0``, ``npu:1``, ``cpu``."""
        self.address = launch.address
        """Address of this node for other hosts."""
        self.master_address = launch.master
        self.cluster_key = launch.key
        """Key with which this process speaks to other hosts, or None. Printed, a key shows its fingerprint only."""
        self.log_file = launch.log_file
        """File of its stderr, on this node."""
        self.job_info = JobInfo(
            name=launch.spec.name,
            job_id=launch.job_id,
            accelerator_type=launch.spec.accelerator_type,
            user_config=launch.spec.user_config,
        )
        self.actor_info = self._actor(launch.spec.role(launch.role), launch.place.rank)

    @property
    def roles(self) -> list[str]:
        """Names of all roles of the job, in the order of their definition."""
        return [role.name for role in self._spec.roles]

    def workers_of(self, role: str) -> list[ActorInfo]:
        """Return the workers of a role, by rank; empty if there is no such role. Of a role with a range of nodes,
        return those that are there now."""
        return [
            self._actor(spec, rank)
            for spec in self._spec.roles
            if spec.name == role
            for rank in range(spec.total)
            if not has_range(spec) or self._is_there(spec.worker(rank))
        ]

    def ports(self, num: int = 1) -> list[int]:
        """Return TCP ports of this host that the agent holds for this worker. Blocks for some milliseconds.

        They are of ``UNIFIED_PORT_RANGE`` if the site sets it, else from 20000 to 29999. Each call returns the same
        ones, also after a restart on the same node: ``ports(2)`` the first two of ``ports(3)``. They are free again
        60 s after the job has left the node. Concepts (*Ports*) has a table of servers that can listen on them.

        Args:
            num: 1 to 64.

        Raises:
            UsageError: the node has too few free ports; `num` is out of range; or a forked process, or a callback of
                `names.on_change`, asks for more than this worker has.
            RpcTimeoutError: the agent did not answer within 60 s.
        """
        if num not in range(1, MAX_PORTS + 1):
            raise UsageError(f"ports({num!r}): a worker may have 1 to {MAX_PORTS}.")
        if num > len(self._ports):
            if self._hold_ports is None:
                raise UsageError(f"ports({num}): {self!r} has no agent, which would hold them: run it in a job.")
            self._ports = self._hold_ports(num)
        return self._ports[:num]

    @property
    def should_stop(self) -> bool:
        """True once this worker was asked to stop.

        A loop that reads this gets the job's grace period (10 s unless set) to end by itself. A worker that never reads
        it, and registers no callback, is ended at once.
        """
        self._stop.watch()
        return self._stop.is_asked

    def time_left(self) -> float | None:
        """Return the seconds until SLURM ends the allocation of this worker's node, 0 at least; None: there is no
        allocation, or it has no time limit.

        A limit that is changed later counts from the next start of the allocation. `should_stop` is true before the
        end, as early as the job's grace needs.
        """
        ends_at = os.environ.get(ENDS_AT)
        return max(0.0, float(ends_at) - time.time()) if ends_at else None

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Have `callback()` called, in a thread of its own, when this worker is asked to stop."""
        self._stop.on_stop(callback)

    def saving(self) -> AbstractContextManager[None]:
        """Return a context in which a checkpoint is written: a stop or suspend waits until the context is left.

        The wait may exceed the grace period by the job's `save_grace_s` (60 s unless set). `CheckpointManager` and the
        training programs enter the context by themselves. A restart after a failure does not wait.
        """
        return self._stop.saving()

    @property
    def should_checkpoint(self) -> bool:
        """True once a change of the role's members was announced (`nnodes="2:8"`, and a node came): training goes on
        from the checkpoint that is made now."""
        return self._changes.is_announced

    def on_round_change(self, callback: Callable[[RoundNotice], None]) -> None:
        """Have `callback(notice)` called, in a thread of its own, when a change of the role's members is announced.

        The notice has a `reason`, a sentence, and `within_s`, the seconds after which this process is restarted unless
        it is in an elastic loop.
        """
        self._changes.on_change(callback)

    def ready_for_round_change(self) -> None:
        """Say that an announced change may come now: everything that must outlast this process has been saved.

        The change comes when all workers of the role have said so. Without an announced change, this does nothing.
        """
        self._changes.ready()

    def grace_left(self) -> float:
        """Return the seconds that are left of the grace period of a stop; all of it before a stop was asked for."""
        return self._stop.left_s()

    def fail(self, error: BaseException) -> None:
        """End this worker with an error, from any thread, as if its entry point had raised it.

        If the entry point has not returned, this comes into force when it does. A worker that has finished, and serves
        nobody, does not fail any more.
        """
        self._stop.fail(error)

    def on_finish(self, callback: Callable[[], None]) -> None:
        """Call `callback()` in the main thread once the entry point has returned; not if it raises. The callback should
        be quick. If it is given twice, it is called once."""
        if callback not in self._finishers:
            self._finishers.append(callback)

    def snapshot(self, state: Any, step: int) -> None:
        """Copy a state into memory that outlives this process and, by copies on other nodes, this node.

        Returns when the copy is made. From the third time on the memory is there, and this takes as long as a copy
        of that many bytes. It is never written to a file, and no other job can read it. `snapshots.configure` sets how
        often copies go to another node.

        Args:
            state: nested dicts, lists and tuples of tensors (on any device, also in pieces), arrays and values that can
                be pickled; at its top there may be modules, optimizers and other objects with a `state_dict`.
            step: steps done, from 0 up. Ranks of one round take the same steps, and are never more than one apart.

        Raises:
            SnapshotQuotaError: the snapshot exceeds the memory that the node gives to snapshots.
            SnapshotError: the node's snapshot server cannot be reached.
            UsageError: the state cannot be pickled.
        """
        self.snapshots.take(state, step)

    def restore(self, state: Any = None, *, step: int | None = None) -> Restored | None:
        """Return the newest state of which all ranks of the round have a snapshot; all ranks call this together.

        Each rank takes its part from its node's memory, else from another node's, else from storage.

        Args:
            state: is filled in place: tensors are copied into, objects with `load_state_dict` are given theirs, other
                values are replaced. If it is a dict with keys, only these are restored; dicts in it get all their keys.
                Without it a new state is returned, all in host memory.
            step: the only step to restore; None: the newest.

        Returns:
            Step, source and state; None: no snapshot is common to all ranks, as at the first start.

        Raises:
            SnapshotError: the snapshot does not fit `state`, or there is none of `step`.
            RoundMeetingError: another rank did not come.
        """
        return self.snapshots.restore(state, step=step)

    @cached_property
    def snapshots(self) -> Snapshots:
        """Snapshots of this worker, and their options."""
        from unified.snapshot.worker.snapshots import Snapshots

        made = Snapshots(self._launch, self._round_place)
        self.on_finish(made.close)
        return made

    def _round_place(self) -> RoundPlace:
        from unified.rounds.rendezvous_store import STORE_WITHIN_S, connect
        from unified.rounds.snapshot_agreement import RoundPlace

        actor, environ = self.actor_info, os.environ
        within_s = actor.role_spec.communication.timeout_s or STORE_WITHIN_S
        if actor.sub_master is None:  # this worker restarts alone, so it restores alone
            return RoundPlace(actor.name, self.round, 0, 1, None, within_s)
        store = partial(connect, environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), within_s)
        alone = actor.world_size == 1
        return RoundPlace(actor.role, self.round, actor.rank, actor.world_size, None if alone else store, within_s)

    def report(self, step: int | None = None, total: int | None = None, **metrics: Any) -> None:
        """Report the progress of this worker, for the driver and `unified status`.

        Cheap: reports are sent together, every tenth of a second and at the end. A value that is not named keeps its
        last content. The series (`unified metrics JOB WORKER`) has one point for each new step, with all that was
        reported since that step was named; without steps, one for each report. Old points are thinned. Trackers that
        `report_to=` names get the reports, too. In a process that this worker forked (a data loader), this does
        nothing.

        Args:
            step: steps done.
            total: steps to do.
            metrics: numbers, texts, or tensors and arrays with one element. 256 names are kept; a line on stderr says
                if there are more. Of a text, 200 characters are kept.

        Raises:
            TypeError: a value of another kind.
            UsageError: (a ValueError) a name of more than 200 characters, or a number or text that cannot be sent.
        """
        if os.getpid() == self._pid:
            self._reporter.report(step, total, metrics)

    def _finish(self) -> None:
        """Call the `on_finish` callbacks once the entry point has returned."""
        finishers, self._finishers = self._finishers, []
        for callback in finishers:
            try:
                callback()
            except Exception:  # the other callbacks are still called
                traceback.print_exc()

    def _begin_round(self, order: RunOrder) -> None:
        self.round = order.round
        spec = self.actor_info.role_spec
        ranks = {"rank": order.rank, "world_size": order.world_size, "node_rank": order.node_rank}
        self.actor_info = self._actor(spec, self._launch.place.rank, **ranks)

    def _is_there(self, name: str) -> bool:
        return name == self._launch.name or self.bus.directory.reachable(name) is not None

    def _actor(self, spec: RoleSpec, index: int, **of_round: int) -> ActorInfo:
        """Describe a worker by its rank in the role. `of_round` are the ranks that its round has changed."""
        name = spec.worker(index)
        return ActorInfo(
            name=name,
            role=spec.name,
            **{**asdict(spec.place(index)), **of_round},
            node=self._launch.node if name == self._launch.name else self.bus.directory.node(name),
            sub_master="elastic" if spec.kind == "elastic" else None,
            role_spec=spec,
        )

    def __repr__(self) -> str:
        return f"Worker({self.actor_info.name!r}, job={self.job_info.job_id!r}, incarnation={self.incarnation})"


_current: Worker | None = None


def current_worker() -> Worker:
    """Return the worker that this process is.

    Raises:
        NotInWorkerError: this process is not a worker of a job.
    """
    if _current is None:
        raise NotInWorkerError(
            "current_worker() was called outside a worker: it works in code that a job's workers run "
            "(an entry point, or what it calls), not in the driver that builds and submits the job."
        )
    return _current


def worker_here() -> Worker | None:
    """Return the worker that this process is, or None outside a job."""
    return _current


def saving_here() -> AbstractContextManager[None]:
    """Return the context in which this process writes a checkpoint: `Worker.saving`, if it is a worker."""
    return _current.saving() if _current is not None else nullcontext()


def set_current_worker(worker: Worker | None) -> None:
    """Make `worker` what `current_worker()` returns; the runtime calls it once, tests as they need."""
    global _current
    _current = worker
