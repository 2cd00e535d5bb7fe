"""Discovery of a process's identity and of its coordinator: from arguments, from the job, from the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from unified.config.addresses import LOCAL, parse_coordinator
from unified.config.logging import log_from
from unified.config.runtime import RuntimeSettings
from unified.config.settings import DEFAULT_PORT
from unified.coordinator.client import Coordinator, RemoteCoordinator
from unified.coordinator.embedded import embedded_coordinator
from unified.errors import UsageError
from unified.worker.context import worker_here


@dataclass(frozen=True, kw_only=True)
class WorkerIdentity:
    """The identity of a process, as far as it can be discovered."""

    space: str = ""
    """The job's id; outside a job ``UNIFIED_SPACE``, or empty."""
    worker_id: str = ""
    """The worker's id; empty: not known."""
    incarnation: int = -1
    """In a job: the incarnation of the worker, from 0."""
    is_elastic: bool = False
    """True if all workers of its role are started again together."""
    rank: int | None = None
    world_size: int | None = None
    workers: tuple[str, ...] = ()
    """Ids of all workers that train together, by rank; empty: not known."""


def discover(env: Mapping[str, str] | None = None) -> WorkerIdentity:
    """Discover the identity: inside a job from `current_worker()`, else from ``UNIFIED_SPACE``, ``WORKER_ID``, ``RANK``
    and ``WORLD_SIZE``. Outside a job this also sets the environment's log level; a job's worker sets it at its start.
    """
    worker = worker_here()
    if worker is not None:
        me = worker.actor_info
        names = tuple(actor.name for actor in worker.workers_of(me.role))[: me.world_size]
        return WorkerIdentity(
            space=worker.job_info.job_id,
            worker_id=me.name,
            incarnation=worker.incarnation,
            is_elastic=me.sub_master == "elastic",
            rank=me.rank,
            world_size=me.world_size,
            workers=names,
        )
    own = RuntimeSettings.load_own(env)
    if own.says("", "log_level"):
        log_from(own.log_level)
    return WorkerIdentity(
        space=own.space,
        worker_id=own.worker_id if own.says("", "worker_id") else "",
        rank=own.rank if own.says("", "rank") else None,
        world_size=own.world_size if own.says("", "world_size") else None,
    )


@dataclass(frozen=True, kw_only=True)
class LocalRegistration:
    """An incarnation of a worker that this process registered."""

    space: str
    rank: int
    world_size: int
    worker_id: str
    session: str
    member: str
    """The name of its rank: see `member_of_rank`."""


_registered: list[LocalRegistration] = []
"""Registrations, the newest last."""


def register(me: LocalRegistration) -> None:
    """Remember the id and session under which this process acts for a rank: shards and heartbeats must be of the same
    incarnation of the same worker."""
    deregister(me)
    _registered.append(me)


def deregister(me: LocalRegistration) -> None:
    if me in _registered:
        _registered.remove(me)


def session_of(space: str, member: str) -> str:
    """Return the session of this process as the worker of this rank; empty if it has not registered as this worker."""
    for each in reversed(_registered):
        if (each.space, each.member) == (space, member):
            return each.session
    return ""


def registered(space: str) -> list[LocalRegistration]:
    """Return the registrations of this process in a space: one, unless it acts for several ranks."""
    return [each for each in _registered if each.space == space]


def member_of_rank(identity: WorkerIdentity, rank: int, world_size: int | None) -> str:
    """Return the name by which datasets know a rank. It is the same in every process of a world, and does not depend on
    the worker's id. In a job it is the name of the worker that has this rank in its role, else ``worker-{rank}``.
    """
    check_rank(rank, world_size)
    is_role = world_size in (None, identity.world_size) and rank < len(identity.workers)
    return identity.workers[rank] if is_role else f"worker-{rank}"


def worker_of_rank(identity: WorkerIdentity, rank: int, world_size: int | None) -> str:
    """Return the id of the worker that has this rank, if it is known here; else ``worker-{rank}``."""
    check_rank(rank, world_size)
    for each in reversed(_registered):
        if (each.space, each.rank) == (identity.space, rank) and world_size in (None, each.world_size):
            return each.worker_id
    if rank == identity.rank and identity.worker_id:
        return identity.worker_id
    return identity.workers[rank] if rank < len(identity.workers) else f"worker-{rank}"


def check_rank(rank: int | None, world_size: int | None) -> None:
    """Raise UsageError if rank and world size do not fit together."""
    if world_size is not None and world_size < 1:
        raise UsageError(f"the world has {world_size} workers: it must have at least one.")
    if rank is not None and rank < 0:
        raise UsageError(f"rank {rank} is below 0: ranks count from 0.")
    if rank is not None and world_size is not None and rank >= world_size:
        raise UsageError(f"rank {rank} is not in a world of {world_size}: its ranks are 0 to {world_size - 1}.")


def check_worker_id(worker_id: str, coordinator: str | Coordinator | None) -> None:
    """Raise UsageError if the address of a coordinator was given in place of a worker's name.

    ``HOST:NUMBER`` may be a name, such as host and pid. It is taken for an address if nothing else names a coordinator,
    because this worker would be alone then.
    """
    word = worker_id.strip()
    is_address = word.lower() == LOCAL or re.fullmatch(r".+:\d{2,5}/?", word)
    if "://" in word or (is_address and named_coordinator(coordinator) is None):
        raise UsageError(
            f"worker_id={worker_id!r} is the address of a coordinator, not the name of a worker: write "
            f"TrainingOrchestrator(coordinator_url={worker_id!r}), and worker_id=… if it is to have a name of its own."
        )


def named_coordinator(given: str | Coordinator | None) -> str | Coordinator | None:
    """Return the given coordinator, else the master of this process's job, else ``COORDINATOR_URL``, else None."""
    if given:
        return given
    worker = worker_here()
    if worker is not None and worker.master_address:
        return worker.master_address
    own = RuntimeSettings.load_own()
    return own.coordinator_url if own.says("", "coordinator_url") else None


def check_meeting_place(given: str | Coordinator | None, rank: int, world_size: int) -> None:
    """Raise UsageError if a worker would wait for others in its own process, although nobody named ``local``."""
    if world_size > 1 and named_coordinator(given) is None:
        raise UsageError(
            f"rank {rank} of {world_size} has no coordinator where it could meet the others: set "
            "COORDINATOR_URL (or coordinator_url) to the address of a master, such as "
            f"tcp://10.0.0.1:{DEFAULT_PORT}. {LOCAL!r} is for workers that are all in one process."
        )


def open_coordinator(given: str | Coordinator | None) -> tuple[Coordinator, bool]:
    """Open the coordinator; return it, and whether the caller has to close it.

    Args:
        given: an address (see `unified.config.addresses.parse_coordinator`), ``local``, or a coordinator; None: the
            result of `named_coordinator`, else a coordinator in this process.
    """
    named = named_coordinator(given)
    if isinstance(named, Coordinator):
        return named, False
    address = parse_coordinator(named or LOCAL)
    if address is None:
        return embedded_coordinator(), False
    worker = worker_here()
    return RemoteCoordinator(address, key=None if worker is None else worker.cluster_key), True
