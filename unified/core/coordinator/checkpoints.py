"""Which checkpoint of a series is the latest: the one of the highest step, whoever tells of it, and however often.

Until somebody tells that training went back: then the one to which it went.
"""

from __future__ import annotations

import math

from unified.core.coordinator.messages import Token
from unified.core.coordinator.records import CHECKPOINT, Checkpoint, row_key
from unified.core.coordinator.state import Space
from unified.core.coordinator.turn import Turn
from unified.protocol.coordinator import CheckpointResponse, GetLatestCheckpoint, NotifyCheckpoint, RecoveryInfo

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
