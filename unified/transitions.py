"""A table of legal moves between states, and the error that names an illegal one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from unified.errors import InvariantError

S = TypeVar("S", bound=StrEnum)


@dataclass(frozen=True)
class TransitionTable(Generic[S]):
    """Legal moves of one kind of thing: ``{state: (states it may become, …)}``.

    The documentation's pictures are drawn from these tables, so a table is the whole truth.
    """

    what: str
    moves: Mapping[S, tuple[S, ...]]

    def check(self, who: str, old: S, new: S) -> S:
        """Return `new`, or raise `InvariantError` naming who tried to move where."""
        if new not in self.moves[old]:
            legal = ", ".join(self.moves[old]) or "nothing: it is final"
            raise InvariantError(f"{self.what} {who} cannot go from {old} to {new}; from {old} it may become {legal}.")
        return new

    def mermaid(self) -> str:
        """Return the table as a mermaid state diagram."""
        lines = ["stateDiagram-v2"]
        for old, news in self.moves.items():
            lines += [f"    {old} --> {new}" for new in news] or [f"    {old} --> [*]"]
        return "\n".join(lines)
