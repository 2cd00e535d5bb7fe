"""Which checkpoint of a series is the latest: the one of the highest step, whoever tells of it, and however often.

Until somebody tells that training went back: then the one to which it went.

What workers tell for the event log: one of a few words, so many a minute, and no line that breaks the log.
"""

from __future__ import annotations

import math

from unified.core.coordinator.messages import Token, Turn
from unified.core.coordinator.records import CHECKPOINT, MAX_TOLD, TOLD_WINDOW_S, Checkpoint, row_key
from unified.core.coordinator.state import Space
from unified.protocol.client_master import Done
from unified.protocol.coordinator import (
    CheckpointResponse,
    GetLatestCheckpoint,
    NotifyCheckpoint,
    RecoveryInfo,
    TellEvent,
)

REPORT_S = 60.0
"""From one checkpoint of a series that is put into the event log to the next, so that those of a job that saves each
second do not drive out everything else."""


def notify(turn: Turn, space: Space, token: Token, request: NotifyCheckpoint) -> None:
    """A checkpoint is complete. Of two with one step the one that was told of last counts: it lies there now."""
    if request.step < 0 or not request.path:
        turn.refuse(
            token,
            "bad-request",
            f"a checkpoint has a step of 0 or more and the path of its manifest; this one has step {request.step} and "
            f"path {request.path!r}.",
        )
        return
    latest = space.checkpoints.get(request.name)
    if latest is not None and request.step < latest.notice.step and not request.goes_back:
        turn.answer(token, CheckpointResponse(is_latest=False))
        return
    if latest is None or latest.notice != request:
        reported_at = latest.reported_at if latest is not None else -math.inf
        is_news = request.goes_back or turn.now - reported_at >= REPORT_S
        checkpoint = space.checkpoints[request.name] = Checkpoint(
            notice=request, saved_at=turn.now, reported_at=turn.now if is_news else reported_at
        )
        turn.save(CHECKPOINT, row_key(space.name, request.name), checkpoint)
        if is_news:
            turn.report(
                "checkpoint-complete",
                f"{'training went back: ' if request.goes_back else ''}"
                f"step {request.step} of series {request.name!r} is at {request.path}",
                space.name,
                request.worker_id,
            )
    turn.answer(token, CheckpointResponse(is_latest=True))


def latest(turn: Turn, space: Space, token: Token, request: GetLatestCheckpoint) -> None:
    """Where to go on from."""
    checkpoint = space.checkpoints.get(request.name)
    if checkpoint is None:
        turn.answer(token, RecoveryInfo(is_found=False))
        return
    notice = checkpoint.notice
    answer = RecoveryInfo(
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
    turn.answer(token, answer)


MAX_NAME = 200
MAX_REASON = 500
"""Characters."""


def tell(turn: Turn, space: Space, token: Token, request: TellEvent) -> None:
    """Report it, unless there were too many of late."""
    worker_id = request.worker_id
    if not worker_id or len(worker_id) > MAX_NAME or not worker_id.isprintable():
        turn.refuse(token, "bad-request", f"an event is told by a worker_id of 1 to {MAX_NAME} printable characters.")
        return
    if len(space.told_at) == MAX_TOLD and turn.now - space.told_at[0] < TOLD_WINDOW_S:
        note = f"not kept: {MAX_TOLD} events were told within {TOLD_WINDOW_S:g} s"
        turn.answer(token, Done(note=note))
        return
    space.told_at.append(turn.now)
    reason = request.reason if len(request.reason) <= MAX_REASON else f"{request.reason[:MAX_REASON]}…"
    turn.report(request.event, reason, space.name, worker_id)
    turn.answer(token, Done())
