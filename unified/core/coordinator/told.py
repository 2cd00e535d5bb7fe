"""What workers tell for the event log: one of a few words, so many a minute, and no line that breaks the log."""

from __future__ import annotations

from unified.core.coordinator.messages import Token
from unified.core.coordinator.records import MAX_TOLD, TOLD_WINDOW_S
from unified.core.coordinator.state import Space
from unified.core.coordinator.turn import Turn
from unified.protocol.client_master import Done
from unified.protocol.coordinator import TellEvent

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
