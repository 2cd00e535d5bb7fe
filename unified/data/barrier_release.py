"""What it means to a worker how its barrier ended."""

from __future__ import annotations

from unified.errors import BarrierError, BarrierTimeoutError
from unified.protocol.coordinator import BarrierResponse


def check_release(barrier_id: str, answer: BarrierResponse) -> None:
    """Raise what the end of a barrier means to those who waited, if not all had arrived.

    Raises:
        BarrierTimeoutError: the time of one of them was over.
        BarrierError: a worker was lost, or left; or the barrier's space was closed.
    """
    if answer.released_by == "arrived":
        return
    kind = BarrierTimeoutError if answer.released_by == "timeout" else BarrierError
    raise kind(
        answer.reason or f"barrier {barrier_id!r} was {answer.released_by}.",
        arrived=answer.arrived,
        missing=answer.missing,
        lost=answer.lost,
        code=answer.released_by,
    )
