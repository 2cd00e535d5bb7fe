"""Requests of a worker to the master about its own job."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, ParamSpec, TypeVar

from unified.api.runtime.role_actor import actor_named, actors_of
from unified.client.connection import MasterConnection
from unified.client.handle import restart_workers
from unified.client.mirror import JobWatch
from unified.job.enums import MasterStage
from unified.protocol.client_master import Done, GetJob, JobStatus, RestartWorkers, StopJob
from unified.protocol.records import DirectoryEntry, Reachability, Stage
from unified.security.keys import ClusterKey
from unified.worker.context import ActorInfo, current_worker

P = ParamSpec("P")
R = TypeVar("R")
POLL_S = 30.0
"""Seconds for which the master holds an answer back while nothing changes."""


@dataclass(frozen=True)
class MasterStatus:
    """Status of the job."""

    stage: MasterStage
    exit_code: int | None = None
    """None before the job has ended."""
    job_restart_count: int = 0


class MasterCall(Generic[P, R]):
    """A function that asks the master, with a variant for event loops."""

    def __init__(self, function: Callable[P, R]) -> None:
        self._function = function
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    async def async_call(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function on a thread, so that the event loop goes on."""
        return await asyncio.to_thread(self._function, *args, **kwargs)


def get_status() -> MasterStatus:
    """Stage, exit code and number of restarts of this worker's job."""
    job = _master().ask(GetJob(job=_job_id()), JobStatus)
    return MasterStatus(job.stage, job.exit_code, job.num_restarts)


def get_actor_info(name: str) -> ActorInfo:
    """The worker of this name (full or ``role-rank``); ValueError if there is none."""
    return actor_named(name)


def get_workers_by_role(role: str, optional: bool = False) -> list[ActorInfo]:
    """The workers of a role by rank; ValueError if there are none, unless `optional`."""
    return actors_of(role, optional=optional)


def get_all_roles() -> dict[str, list[ActorInfo]]:
    """The workers of every role of the job."""
    worker = current_worker()
    return {role: worker.workers_of(role) for role in worker.roles}


def restart_actors(names: Iterable[str] = (), *, actor_names: Iterable[str] = ()) -> None:
    """Restart these workers (full names or ``role-rank``), and return when their new incarnations are READY.

    A rank of an elastic role restarts with its role. A call that begins afterwards never reaches an old incarnation.
    `actor_names` is another name of `names`.

    Raises:
        RefusedError: the job ends meanwhile.
    """
    workers = [actor_named(name).name for name in (*names, *actor_names)]
    if workers:  # to the master an empty list means all
        restart_workers(_master(), _job_id(), workers, asked=_mark_dead)


def restart() -> None:
    """Restart the whole job, this worker included."""
    _master().ask(RestartWorkers(job=_job_id(), workers=[]), Done)


def stop() -> None:
    """Stop the whole job, this worker included."""
    _master().ask(StopJob(job=_job_id(), reason=f"asked by worker {current_worker().actor_info.name}"), Done)


def wait() -> int:
    """Wait until the job's outcome is decided, and return its exit code.

    The job is then STOPPING and stops this worker, too. The worker has the job's `stop_grace_s` to act on the answer.
    No worker sees STOPPED, because no worker is left then. Do not call this in a driver: the outcome is not decided
    before the driver's entry point has returned.
    """
    current_worker().on_stop(lambda: None)  # without a callback, a stop ends the worker at once, without the answer
    watch = JobWatch(_master(), _job_id(), has_workers=False)
    while True:
        job = watch.next_status(POLL_S)
        if job.outcome is not None:
            return job.outcome
        if job.stage is Stage.STOPPED:
            return job.exit_code or 0


class PrimeMasterApi:
    """Requests of a worker to the master about its own job. Each can be awaited as ``….async_call(…)``.

    Raises:
        RefusedError: the master refused.
        MasterUnreachableError: the master did not answer.
        NotInWorkerError: this process is not a worker.
    """

    get_status = MasterCall(get_status)
    get_actor_info = MasterCall(get_actor_info)
    get_workers_by_role = MasterCall(get_workers_by_role)
    get_all_roles = MasterCall(get_all_roles)
    restart_actors = MasterCall(restart_actors)
    restart = MasterCall(restart)
    stop = MasterCall(stop)
    wait = MasterCall(wait)


def _mark_dead(incarnations: dict[str, int]) -> None:
    """Treat the incarnations before these as dead, though this worker has not heard of their end."""
    worker = current_worker()
    dead = [
        DirectoryEntry(worker=name, incarnation=number - 1, state=Reachability.DEAD, reason="restarted on request")
        for name, number in incarnations.items()
        if number > 0 and name != worker.actor_info.name
    ]
    if dead:
        worker.bus.update_directory(dead)


def _job_id() -> str:
    return current_worker().job_info.job_id


def _master() -> MasterConnection:
    worker = current_worker()
    return _connected(worker.master_address, worker.cluster_key)


@functools.cache
def _connected(address: str, key: ClusterKey | None) -> MasterConnection:
    """Return the connection of this process, made at first use; a worker never changes its master."""
    return MasterConnection(address, key=key)
