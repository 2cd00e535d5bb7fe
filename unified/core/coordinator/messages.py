"""What can happen to a coordinator: everything its core is ever told, but for heartbeats on their short way."""

from __future__ import annotations

from unified.protocol.coordinator import CoordinatorRequest
from unified.values import Value

Token = tuple[bytes, int]
"""Names one question that waits for its one answer, such as the connection and the request's id. Opaque here."""


class RequestCame(Value, frozen=True, kw_only=True):
    """A worker asks. It is answered in this step, or in a later one if it waits at a barrier."""

    token: Token
    request: CoordinatorRequest
    lives: dict[str, int] | None = None
    """With a `RestorePosition`: which life of each worker of the space runs, from who runs them. None: nobody does."""


class WorkerGone(Value, frozen=True, kw_only=True):
    """Who runs this worker knows that its life is over: nobody has to wait until its heartbeats are missed."""

    space: str
    worker_id: str
    reason: str
    """A clause for people: ``it was killed by signal 9``."""


class SpaceClosed(Value, frozen=True, kw_only=True):
    """Nobody will ask in this space again, as when its job ended: all that is known of it may be forgotten."""

    space: str


class TimePassed(Value, frozen=True, kw_only=True):
    """`CoordinatorCore.next_deadline` has come. Too early or too often does no harm."""


Event = RequestCame | WorkerGone | SpaceClosed | TimePassed
