"""Whose mail is not taken any more."""

from __future__ import annotations


class Departed:
    """Inbox ids of lives that are over: of so many of the last that mail of an earlier one cannot be on its way."""

    KEPT = 10_000

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}

    def add(self, inbox_id: str) -> None:
        """That life is over; by one thread at a time."""
        self._ids[inbox_id] = None
        if len(self._ids) > self.KEPT:
            del self._ids[next(iter(self._ids))]

    def __contains__(self, inbox_id: object) -> bool:
        return inbox_id in self._ids
