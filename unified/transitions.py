"""A table of legal moves between states, and the error that names an illegal one."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

from unified.errors import InvariantError

S = TypeVar("S", bound=StrEnum)


class TransitionTable(Generic[S]):
    """Legal moves of one kind of thing: ``{state: (states it may become, …)}``.

    The documentation's pictures are drawn from these tables, so a table is the whole truth.
    """

    def __init__(self, what: str, moves: Mapping[S, tuple[S, ...]]) -> None:
        self.what = what
        self.moves = dict(moves)

    def is_legal(self, old: S, new: S) -> bool:
        return new in self.moves[old]

    def check(self, who: str, old: S, new: S) -> S:
        """Return `new`, or raise `InvariantError` naming who tried to move where."""
        if not self.is_legal(old, new):
            legal = ", ".join(self.moves[old]) or "nothing: it is final"
            raise InvariantError(f"{self.what} {who} cannot go from {old} to {new}; from {old} it may become {legal}.")
        return new

    def is_final(self, state: S) -> bool:
        return not self.moves[state]

    def mermaid(self) -> str:
        """Return the table as a mermaid state diagram."""
        lines = ["stateDiagram-v2"]
        for old, news in self.moves.items():
            lines += [f"    {old} --> {new}" for new in news] or [f"    {old} --> [*]"]
        return "\n".join(lines)
