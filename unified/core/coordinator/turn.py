"""One step in the making: what it answers, reports and has to persist."""

from __future__ import annotations

import msgspec

from unified.core.coordinator.actions import Action, Answer, Forget, Persist, Report
from unified.core.coordinator.messages import Token
from unified.protocol.client_master import MasterAnswer, Refused


class Turn:
    """What the functions of this package write to. A record that is touched twice is persisted once, as it ends up."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.members: dict[tuple[str, str], set[str]] = {}
        """By space and dataset: over whom it is to be spread by the end of the step, if that changes. When many are
        lost at once, it is spread once."""
        self._records: dict[tuple[str, str], object] = {}
        """By kind and key; None: forget it."""
        self._reports: list[Action] = []
        self._answers: list[Action] = []

    def save(self, kind: str, key: str, record: object) -> None:
        """Persist the record as it is at the end of the step; None forgets it."""
        self._records[kind, key] = record

    def answer(self, token: Token, answer: MasterAnswer) -> None:
        self._answers.append(Answer(token=token, answer=answer))

    def refuse(self, token: Token, code: str, reason: str) -> None:
        self._answers.append(Answer(token=token, answer=Refused(code=code, reason=reason)))

    def report(self, event: str, reason: str, space: str, worker_id: str = "") -> None:
        self._reports.append(Report(event=event, reason=reason, space=space, worker_id=worker_id))

    def actions(self) -> list[Action]:
        if not self._records:
            return [*self._reports, *self._answers]
        rows = [(*key, msgspec.msgpack.encode(record)) for key, record in self._records.items() if record is not None]
        keys = [key for key, record in self._records.items() if record is None]
        kept: list[Action] = [Persist(rows=rows)] if rows else []
        if keys:
            kept.append(Forget(keys=keys))
        return [*kept, *self._reports, *self._answers]
