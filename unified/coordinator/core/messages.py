"""Events and actions of the coordinator's core, and the step that collects the actions.

The core hears of everything by events, except for heartbeats, which take a shorter way. The rows that a step persists
and forgets are one transaction, on disk before any answer of the step leaves.
"""

from __future__ import annotations

import msgspec

from unified.protocol.client_master import MasterAnswer
from unified.protocol.coordinator import CoordinatorRequest
from unified.values import Value

Token = tuple[bytes, int]
"""Request id of a request that waits for its answer, such as connection and number. Opaque here."""


class RequestCame(Value, frozen=True, kw_only=True):
    """A worker's request. It is answered in this step, or in a later one if the worker waits at a barrier."""

    token: Token
    request: CoordinatorRequest
    incarnations: dict[str, int] | None = None
    """With a `RestorePosition`: incarnation of each worker that runs in the space. None: the space is not a job."""


class WorkerGone(Value, frozen=True, kw_only=True):
    """The end of an incarnation, reported by the master: nobody has to wait until heartbeats are missed."""

    space: str
    worker_id: str
    reason: str
    """A clause for people: ``it was killed by signal 9``."""


class SpaceClosed(Value, frozen=True, kw_only=True):
    """The end of a space, for example because its job ended: its state may be forgotten."""

    space: str


class CoordinatorTick(Value, frozen=True, kw_only=True):
    """The arrival of `CoordinatorCore.next_deadline`. An early or repeated tick does no harm."""


Event = RequestCame | WorkerGone | SpaceClosed | CoordinatorTick


Row = tuple[str, str, bytes]
"""Kind, key and data, as in the master's store. Kind and key together are unique; kinds begin with ``coordinator-``."""


class Persist(Value, frozen=True, kw_only=True):
    """Store these rows; each replaces the row of its kind and key. At most one `Persist` per step."""

    rows: list[Row]


class Forget(Value, frozen=True, kw_only=True):
    """Drop the rows of these kinds and keys. At most one `Forget` per step, with other keys than `Persist`."""

    keys: list[tuple[str, str]]


class AnswerRequest(Value, frozen=True, kw_only=True):
    """Answer a request. All workers that a barrier releases get the same object, so it can be encoded once."""

    token: Token
    answer: MasterAnswer


class LogEvent(Value, frozen=True, kw_only=True):
    """A fact or a decision with its reason, for the log and for `unified explain`."""

    event: str
    """A word such as ``worker-lost`` or ``barrier-broken``."""
    reason: str
    space: str
    worker_id: str = ""


Action = Persist | Forget | AnswerRequest | LogEvent


class CoordinatorStep:
    """Context of one step. A record that is saved twice is persisted once, in its last state."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.members: dict[tuple[str, str], set[str]] = {}
        """Changed members, by space and dataset: each dataset is spread once, at the end of the step."""
        self._records: dict[tuple[str, str], object] = {}
        """Records by kind and key; None: forget it."""
        self._reports: list[Action] = []
        self._answers: list[Action] = []

    def save(self, kind: str, key: str, record: object) -> None:
        """Persist the record as it is at the end of the step; None forgets it."""
        self._records[kind, key] = record

    def answer(self, token: Token, answer: MasterAnswer) -> None:
        self._answers.append(AnswerRequest(token=token, answer=answer))

    def report(self, event: str, reason: str, space: str, worker_id: str = "") -> None:
        self._reports.append(LogEvent(event=event, reason=reason, space=space, worker_id=worker_id))

    def actions(self) -> list[Action]:
        if not self._records:
            return [*self._reports, *self._answers]
        rows = [(*key, msgspec.msgpack.encode(record)) for key, record in self._records.items() if record is not None]
        keys = [key for key, record in self._records.items() if record is None]
        kept: list[Action] = [Persist(rows=rows)] if rows else []
        if keys:
            kept.append(Forget(keys=keys))
        return [*kept, *self._reports, *self._answers]
