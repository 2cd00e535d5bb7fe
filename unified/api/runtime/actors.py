"""Finding workers of the own job by role and by name."""

from __future__ import annotations

from unified.errors import UsageError, nearest
from unified.job.names import parse_worker
from unified.worker.context import ActorInfo, current_worker


def actors_of(role: str, *, optional: bool = False) -> list[ActorInfo]:
    """The workers of a role, by rank.

    Raises:
        UsageError: (a ValueError) there are none, and `optional` is False.
        NotInWorkerError: this process is not a worker.
    """
    worker = current_worker()
    actors = worker.workers_of(role)
    if not actors and not optional:
        hint = "" if role in worker.roles else nearest(role, worker.roles)
        raise UsageError(f"No actors found for role '{role}'.{hint}")
    return actors


def actor_named(name: str) -> ActorInfo:
    """The worker of this full name, or short name ``role-rank``, or the rank 0 of the role of this name.

    Raises:
        UsageError: (a ValueError) the job has no such worker.
        NotInWorkerError: this process is not a worker.
    """
    worker = current_worker()
    if name in worker.roles:
        return actors_of(name)[0]
    try:
        role, rank = parse_worker(name)
    except UsageError:
        raise UsageError(f"No actor is named '{name}'.{nearest(name, worker.roles)} {_known(worker.roles)}") from None
    for actor in worker.workers_of(role):
        if name in (actor.name, f"{role}-{actor.rank}"):
            return actor
    total = len(worker.workers_of(role))
    reason = f"Role '{role}' has ranks 0 to {total - 1}: rank {rank}?" if total else _known(worker.roles)
    raise UsageError(f"No actor is named '{name}'. {reason}")


def _known(roles: list[str]) -> str:
    return f"The job has the roles {', '.join(roles)}; write a role, role-rank or a full name."
