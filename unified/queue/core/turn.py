"""What the parts of one queue share: its stock, its handles, and the actions of the step at hand."""

from __future__ import annotations

from unified.queue.core.actions import Action, Record
from unified.queue.core.state import Handle
from unified.queue.core.stock import Stock


class Turn:
    """State that both lines work on.

    Args:
        is_durable: collect the records that a journal needs.
    """

    def __init__(self, stock: Stock, *, is_durable: bool) -> None:
        self.stock = stock
        self.is_durable = is_durable
        self.is_closed = False
        self.handles: dict[int, Handle] = {}
        self.actions: list[Action] = []
        self.next_deadline: float | None = None
        """When time is to be told. It may come early, and then finds nothing to do."""

    def save(self, record: Record) -> None:
        if self.is_durable:
            self.actions.append(record)

    def deadline(self, now: float, wait_s: float | None) -> float | None:
        """A deadline so far from now, about which the shell will be told; none for who does not wait at all."""
        if wait_s is None or wait_s <= 0:
            return None
        deadline = now + wait_s
        if self.next_deadline is None or deadline < self.next_deadline:
            self.next_deadline = deadline
        return deadline

    def take_actions(self) -> list[Action]:
        actions, self.actions = self.actions, []
        return actions
