"""Moves of workers from a node that is out of service, or whose agent stops. Nothing is charged."""

from __future__ import annotations

from collections.abc import Sequence

from unified_master.core.rounds import incarnations, next_round
from unified_master.core.rounds.restart import Cause, restart
from unified_master.core.scheduling.placement import units_of
from unified_master.core.state import STORE, JobRecord, NodeRecord, WorkerRecord
from unified_master.core.step import MasterStep


def move_away(step: MasterStep, job: JobRecord, node: NodeRecord, within_s: float) -> None:
    """Restart a job's workers on this node elsewhere. Elastic roles in a round move with their next one, within
    `within_s`; all others move at once. Finished work is not done again.
    """
    here = [worker for worker in job.workers.values() if worker.node == node.name and worker.allocation is not None]
    if job.is_ending or not here:
        return
    drivers = {role.name for role in job.driver_roles()}
    delivered = [worker for worker in here if worker.is_done and worker.role in drivers]
    rest = [worker for worker in here if not (worker.is_done and worker.role in drivers)]
    state = f"whose agent stops: {node.stops}" if node.drained is None else f"which is drained: {node.drained}"
    why = f"moves away from node {node.name}, {state}"
    later = _announce(step, job, rest, why, within_s)
    now = [worker for worker in rest if worker.name not in later]
    for worker in [*delivered, *(worker for worker in now if worker.kind == "store")]:
        incarnations.end(step, job, worker)
        incarnations.release(step, job, worker)
    if now:
        names = [worker.name for worker in now if worker.kind == "worker"]
        restart(step, job, names, Cause("workers-move", why, node=node.name))


def _announce(step: MasterStep, job: JobRecord, workers: Sequence[WorkerRecord], why: str, within_s: float) -> set[str]:
    """Announce the next round of these workers' elastic roles; of all unfinished ones, if the store is among them.

    Return the names of those that move with that round; none if one of the roles is in no intact round.
    """
    has_store = any(worker.kind == "store" for worker in workers)
    roles = [
        role
        for role in job.elastic_roles()
        if any(worker.role == role.name for worker in workers)
        or (has_store and not all(worker.is_done for worker in job.members(role)))
    ]
    if not all(next_round.may_change(job, role) for role in roles):
        return set()
    for role in roles:
        next_round.announce(step, job, role, f"role {role.name} {why}", within_s)
    names = {role.name for role in roles}
    units = [unit for unit in units_of(job.spec) if any(member.role in names for member in unit.members)]
    return {STORE, *(member.worker for unit in units for member in unit.members)} if roles else set()
