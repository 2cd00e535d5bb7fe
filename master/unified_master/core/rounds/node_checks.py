"""Node checks: the rounds that begin with one. The ranks measure and judge; `node_faults` acts on what they find."""

from __future__ import annotations

from collections.abc import Sequence

from unified.job.spec import RoleSpec
from unified.protocol.records import Failure
from unified_master.core.state import JobRecord, RoleRecord, WorkerRecord

CATEGORY = "node-check"
"""Failure category of a worker whose node is at fault, or is among nodes that cannot work together."""
_OF_THE_CODE = ("user", "setup")
"""Categories of failures that say nothing of the node."""


def is_due(record: RoleRecord, role: RoleSpec, workers: Sequence[WorkerRecord]) -> bool:
    """Return True if the next round of a role is to begin with a check of its nodes.

    One node alone has nothing to be compared with, and a device that fails shows in the first step. Ranks that outlived
    their last round hold models on their devices and are not kept waiting.
    """
    nodes = {worker.node for worker in workers}
    if not role.communication.pre_check or len(nodes) < 2 or any(worker.rejoins for worker in workers):
        return False
    return not nodes.issubset(record.checked_nodes)


def forget(job: JobRecord, worker: WorkerRecord, failure: Failure) -> None:
    """Have the node of a worker checked again, if the node may have caused the failure."""
    if worker.kind != "worker" or failure.is_collateral or failure.category in _OF_THE_CODE:
        return
    record = job.roles[worker.role]
    record.checked_nodes = [name for name in record.checked_nodes if name != worker.node]


def passed(record: RoleRecord, nodes: set[str]) -> None:
    """Note that these nodes need no further check.

    They are all nodes of the round, at the first report of any rank: all ranks have the same verdict.
    """
    record.checked_nodes = sorted(nodes.union(record.checked_nodes))
