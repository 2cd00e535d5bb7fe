"""Memberships: the part that each worker takes in its job now, derived from the master's record of the worker."""

from __future__ import annotations

from enum import StrEnum

from unified.protocol.records import TransitionTable, WorkerState
from unified_master.core.state import WorkerRecord


class WorkerMembership(StrEnum):
    PENDING = "PENDING"
    """Waiting for its first incarnation: its job, or its group, has no place yet."""
    HELD = "HELD"
    """Held back: its next incarnation waits for a back-off."""
    STARTING = "STARTING"
    READY = "READY"
    """Ready: its process waits for an order to run."""
    JOINING = "JOINING"
    """Joining: ordered into a round, but it has not reported that it joined."""
    RUNNING = "RUNNING"
    """Running: a member of a round that goes on, or at work on its own."""
    LEAVING = "LEAVING"
    """Leaving: notified that the members of its round will change, and still in it."""
    LEFT = "LEFT"
    """Left its round unasked, because a collective failed; the root cause is not known yet."""
    BETWEEN = "BETWEEN"
    """Between two rounds: the last one is broken, or the worker has left it as asked."""
    DONE = "DONE"
    """Done: it serves calls, or its entry point has returned."""
    ENDING = "ENDING"
    """Ending: not desired any more, and its agent has not confirmed the end."""
    FAILED = "FAILED"
    """Failed: its incarnation ended badly, and no decision was made yet."""
    ENDED = "ENDED"
    """Ended without a failure, or because it was stopped."""


_M = WorkerMembership
MEMBERSHIP_MOVES = TransitionTable(
    "membership",
    {
        _M.PENDING: (_M.STARTING, _M.ENDED),
        _M.HELD: (_M.STARTING, _M.ENDED),
        _M.STARTING: (_M.READY, _M.ENDING, _M.FAILED),
        _M.READY: (_M.JOINING, _M.ENDING, _M.FAILED),
        _M.JOINING: (_M.RUNNING, _M.BETWEEN, _M.ENDING, _M.FAILED),
        _M.RUNNING: (_M.LEAVING, _M.LEFT, _M.BETWEEN, _M.DONE, _M.ENDING, _M.FAILED, _M.ENDED),
        _M.LEAVING: (_M.BETWEEN, _M.DONE, _M.ENDING, _M.FAILED),
        _M.LEFT: (_M.BETWEEN, _M.DONE, _M.ENDING, _M.FAILED),
        _M.BETWEEN: (_M.JOINING, _M.ENDING, _M.FAILED),
        _M.DONE: (_M.ENDING, _M.FAILED, _M.ENDED),
        _M.ENDING: (_M.ENDED, _M.STARTING, _M.HELD),
        _M.FAILED: (_M.STARTING, _M.HELD, _M.ENDED),
        _M.ENDED: (_M.STARTING, _M.HELD),
    },
)
"""Moves of a worker's membership. One step of the master may take several: a restart ends and begins at once."""


def membership_of(worker: WorkerRecord) -> WorkerMembership:
    """Return the part that a worker, or a store host, takes in its job now."""
    if worker.is_held:
        return WorkerMembership.HELD
    if worker.state is WorkerState.EXITED:
        return WorkerMembership.ENDED if worker.failure is None else WorkerMembership.FAILED
    if not worker.is_desired:
        return WorkerMembership.PENDING if worker.incarnation < 0 else WorkerMembership.ENDING
    match worker.state:
        case WorkerState.STARTING | WorkerState.PENDING:
            return WorkerMembership.STARTING
        case WorkerState.READY:
            return WorkerMembership.READY if worker.run is None else WorkerMembership.JOINING
        case WorkerState.STOPPING:
            return WorkerMembership.ENDING
    notice, run = worker.notice, worker.run
    if notice is not None and (notice.kind == "broken" or worker.left_round >= notice.round):
        return WorkerMembership.BETWEEN
    if worker.state is not WorkerState.RUNNING:
        return WorkerMembership.DONE
    if worker.is_joining:
        return WorkerMembership.JOINING
    if notice is not None:
        return WorkerMembership.LEAVING
    return WorkerMembership.LEFT if run is not None and worker.left_round >= run.round else WorkerMembership.RUNNING
