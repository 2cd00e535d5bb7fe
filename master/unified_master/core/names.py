"""Who holds a name: each claim of a job's workers is decided once, in the order in which claims are heard.

A claim is granted if nobody else holds the name, else refused, and the answer stands until the claim is withdrawn: a
worker that was told no is never given the name behind its back. A name is free again when it is withdrawn and when the
life that holds it is over.
"""

from __future__ import annotations

from unified.protocol.records import NameClaims, NameRefusal
from unified_master.core.state import JobRecord, WorkerRecord
from unified_master.core.step import Turn

MAX_TOLD = 100
"""Claims of one life that are reported as events: one that claims and withdraws without end must not drown the log."""


def hear(turn: Turn, job: JobRecord, worker: WorkerRecord, claims: NameClaims) -> None:
    """Take the claims of a life that can be called. What was heard before, or is older, changes nothing."""
    if claims.number <= worker.claims.number or not job.can_call(worker):
        return
    worker.claims = claims
    for name in worker.names.keys() - claims.names.keys():
        del job.holders[name]
    names: dict[str, int] = {}
    refused = {name: one for name, one in worker.refused.items() if claims.names.get(name) == one.number}
    for name, number in claims.names.items():
        if name in refused:
            continue
        holder = job.holders.setdefault(name, worker.name)
        if holder == worker.name:
            names[name] = number
        else:
            refused[name] = NameRefusal(number=number, holder=holder)
        if worker.names.get(name) != number:
            _tell(turn, job, worker, name, number, holder)
    if (names, refused) != (worker.names, worker.refused):
        worker.names, worker.refused = names, refused
        worker.revision += 1
    turn.save_worker(worker)


def free(job: JobRecord, worker: WorkerRecord) -> None:
    """Its life is over: it holds and claims nothing."""
    for name in worker.names:
        del job.holders[name]
    worker.claims = NameClaims()
    worker.names = {}
    worker.refused = {}


def remember_holders(job: JobRecord) -> None:
    """Find the holders among workers that came from the store."""
    job.holders = {name: worker.name for worker in job.workers.values() for name in worker.names}


def _tell(turn: Turn, job: JobRecord, worker: WorkerRecord, name: str, number: int, holder: str) -> None:
    if number > MAX_TOLD:
        return
    if holder == worker.name:
        event, text = "name-claimed", f"it holds the name {name!r} from now on"
    else:
        event, text = "name-refused", f"the name {name!r} is held by worker {holder}"
    turn.report(event, text, job, worker.role, worker.name, worker.node)
