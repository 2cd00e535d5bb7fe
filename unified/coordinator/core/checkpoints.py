"""The latest checkpoint of each series, and the events that workers send for the log.

The latest checkpoint has the highest step, in any order of notices. When training went back, it is the
checkpoint to which training went. An event is one of a few words; their number per minute is limited.
"""

from __future__ import annotations

import math

from unified.coordinator.core.messages import CoordinatorStep
from unified.coordinator.core.records import CHECKPOINT, EVENTS_WINDOW_S, MAX_EVENTS, Checkpoint, row_key
from unified.coordinator.core.state import Space
from unified.errors import UsageError
from unified.protocol.client_master import Done
from unified.protocol.coordinator import (
    CheckpointResponse,
    CheckpointStatus,
    GetLatestCheckpoint,
    NotifyCheckpoint,
    RecoveryInfo,
    TellEvent,
)

REPORT_S = 60.0
"""Shortest time between two checkpoints of a series in the event log: a job that saves each second would fill it."""


def notify(step: CoordinatorStep, space: Space, request: NotifyCheckpoint) -> CheckpointResponse:
    """Note a complete checkpoint. Of two notices with one step the later one counts: its checkpoint is there now."""
    if request.step < 0 or not request.path:
        raise UsageError(
            f"a checkpoint has a step of 0 or more and the path of its manifest; this one has step {request.step} and "
            f"path {request.path!r}."
        )
    latest = space.checkpoints.get(request.name)
    if latest is not None and request.step < latest.notice.step and not request.goes_back:
        return CheckpointResponse(is_latest=False)
    if latest is None or latest.notice != request:
        reported_at = latest.reported_at if latest is not None else -math.inf
        is_news = request.goes_back or step.now - reported_at >= REPORT_S
        checkpoint = space.checkpoints[request.name] = Checkpoint(
            notice=request, saved_at=step.now, reported_at=step.now if is_news else reported_at
        )
        step.save(CHECKPOINT, row_key(space.name, request.name), checkpoint)
        if is_news:
            step.report(
                "checkpoint-complete",
                f"{'training went back: ' if request.goes_back else ''}"
                f"step {request.step} of series {request.name!r} is at {request.path}",
                space.name,
                request.worker_id,
            )
    return CheckpointResponse(is_latest=True)


def latest(space: Space, request: GetLatestCheckpoint) -> RecoveryInfo:
    checkpoint = space.checkpoints.get(request.name)
    if checkpoint is None:
        return RecoveryInfo(is_found=False)
    notice = checkpoint.notice
    return RecoveryInfo(
        is_found=True,
        step=notice.step,
        path=notice.path,
        size_bytes=notice.size_bytes,
        checksum=notice.checksum,
        world_size=notice.world_size,
        worker_id=notice.worker_id,
        metadata=notice.metadata,
        saved_at=checkpoint.saved_at,
    )


def listing(space: Space) -> list[CheckpointStatus]:
    """Return the latest checkpoint of each series, for people."""
    return [
        CheckpointStatus(
            name=name,
            step=each.notice.step,
            path=each.notice.path,
            size_bytes=each.notice.size_bytes,
            world_size=each.notice.world_size,
            saved_at=each.saved_at,
        )
        for name, each in sorted(space.checkpoints.items())
    ]


MAX_NAME = 200
MAX_REASON = 500
"""Longest texts, in characters."""


def tell(step: CoordinatorStep, space: Space, request: TellEvent) -> Done:
    """Log a worker's event, unless there were too many recently."""
    worker_id = request.worker_id
    if not worker_id or len(worker_id) > MAX_NAME or not worker_id.isprintable():
        raise UsageError(f"an event is told by a worker_id of 1 to {MAX_NAME} printable characters.")
    if len(space.event_times) == MAX_EVENTS and step.now - space.event_times[0] < EVENTS_WINDOW_S:
        return Done(note=f"not logged: {MAX_EVENTS} events came within {EVENTS_WINDOW_S:g} s")
    space.event_times.append(step.now)
    reason = request.reason if len(request.reason) <= MAX_REASON else f"{request.reason[:MAX_REASON]}…"
    step.report(request.event, reason, space.name, worker_id)
    return Done()
