"""Where a process finds its coordinator, and who it is to it: from arguments, from its job, from its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from unified.data.client import COORDINATOR_VARIABLE, LOCAL, Coordinator, RemoteCoordinator, parse_coordinator
from unified.data.local_coordinator import embedded_coordinator
from unified.errors import NotInWorkerError, UsageError
from unified.runtime_settings import RuntimeSettings
from unified.worker.context import Worker, current_worker


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What is known without being told."""

    space: str = ""
    """The job's id; empty outside a job."""
    worker_id: str = ""
    """Empty: not known."""
    life: int = -1
    """In a job: which life of that worker this is, from 0."""
    is_elastic: bool = False
    """All workers of its role are started again together."""
    rank: int | None = None
    world_size: int | None = None
    workers: tuple[str, ...] = ()
    """Ids of all that train together, by rank; empty if they are not known."""


def look_around(env: Mapping[str, str] | None = None) -> Surroundings:
    """Inside a job what `current_worker()` says, else ``WORKER_ID``, ``RANK`` and ``WORLD_SIZE``.

    Raises:
        UsageError: a variable is not a number, or the rank is not in the world.
    """
    worker = _worker()
    if worker is not None:
        me = worker.actor_info
        names = tuple(actor.name for actor in worker.workers_of(me.role))[: me.world_size]
        return Surroundings(
            space=worker.job_info.job_id,
            worker_id=me.name,
            life=worker.incarnation,
            is_elastic=me.sub_master == "elastic",
            rank=me.rank,
            world_size=me.world_size,
            workers=names,
        )
    env = os.environ if env is None else env
    rank, world_size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    check_rank(rank, world_size)
    return Surroundings(worker_id=env.get("WORKER_ID", ""), rank=rank, world_size=world_size)


def settings() -> RuntimeSettings:
    """What ``UNIFIED_CONFIG`` and the environment say, but for where this process stands: see `look_around`.

    Raises:
        UsageError: a key or a value that cannot be.
    """
    return RuntimeSettings.load_shared()


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """A life of a worker that this process registered."""

    space: str
    rank: int
    world_size: int
    worker_id: str
    session: str


_introduced: list[Introduction] = []
"""The newest last."""


def introduce(me: Introduction) -> None:
    """Remember under which id and session this process speaks for a rank: shards and heartbeats must be of the same
    life of the same worker."""
    withdraw(me)
    _introduced.append(me)


def withdraw(me: Introduction) -> None:
    """It does so no more."""
    if me in _introduced:
        _introduced.remove(me)


def session_of(space: str, worker_id: str) -> str:
    """Of the life of this worker that this process is; empty if it is none, as far as is known."""
    for each in reversed(_introduced):
        if (each.space, each.worker_id) == (space, worker_id):
            return each.session
    return ""


def worker_of_rank(around: Surroundings, rank: int, world_size: int | None) -> str:
    """The id of the worker that has this rank, as far as it is known here; else ``worker-{rank}``.

    Raises:
        UsageError: the rank is not in the world.
    """
    check_rank(rank, world_size)
    for each in reversed(_introduced):
        if (each.space, each.rank) == (around.space, rank) and world_size in (None, each.world_size):
            return each.worker_id
    if rank == around.rank and around.worker_id:
        return around.worker_id
    return around.workers[rank] if rank < len(around.workers) else f"worker-{rank}"


def check_rank(rank: int | None, world_size: int | None) -> None:
    """Raise UsageError if they do not fit together."""
    if world_size is not None and world_size < 1:
        raise UsageError(f"the world has {world_size} workers: it must have at least one.")
    if rank is not None and rank < 0:
        raise UsageError(f"rank {rank} is below 0: ranks count from 0.")
    if rank is not None and world_size is not None and rank >= world_size:
        raise UsageError(f"rank {rank} is not in a world of {world_size}: its ranks are 0 to {world_size - 1}.")


def named_coordinator(given: str | Coordinator | None) -> str | Coordinator | None:
    """What is given; else the master of the job that this process works in, else ``COORDINATOR_URL``, else None."""
    if given:
        return given
    worker = _worker()
    return (worker.master_address if worker is not None else "") or os.environ.get(COORDINATOR_VARIABLE) or None


def open_coordinator(given: str | Coordinator | None) -> tuple[Coordinator, bool]:
    """The coordinator, and whether its user closes it.

    Args:
        given: an address (see `unified.data.client.parse_coordinator`), ``local``, or a coordinator; None means the
            one that is named here (`named_coordinator`), else one in this process.
    """
    named = named_coordinator(given)
    if isinstance(named, Coordinator):
        return named, False
    address = parse_coordinator(named or LOCAL)
    if address is None:
        return embedded_coordinator(), False
    worker = _worker()
    return RemoteCoordinator(address, key=None if worker is None else worker.cluster_key), True


def _worker() -> Worker | None:
    try:
        return current_worker()
    except NotInWorkerError:
        return None


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "")
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a whole number.") from None
