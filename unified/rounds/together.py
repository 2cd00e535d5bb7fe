"""Work that ranks do together: one rank, one of each node, or every rank. All ranks raise the error of one.

The error has the same line on every rank, so it does not matter which report the job's master gets first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from unified import errors
from unified.errors import UnifiedError
from unified.rounds.rank_group import Ranks

T = TypeVar("T")


class _RankOutcome(NamedTuple):
    """Result of one rank's work, as it crosses to the others."""

    node: int
    did: bool
    value: Any = None
    error: str = ""
    """Name of the error's class; empty: none."""
    message: str = ""


class RankWork:
    """Work of the ranks of a run.

    Args:
        node: number of this rank's node: ranks of one number share a file system and temporary files.
        local_rank: of this rank on its node, from 0.
    """

    def __init__(self, ranks: Ranks, node: int, local_rank: int) -> None:
        self.ranks = ranks
        self._node = node
        self._is_first = local_rank == 0

    def on_first(self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0; return its result on every rank. A collective."""
        return self._do(work, self.ranks.rank == 0)[0].value  # type: ignore[no-any-return]

    def on_each_node(self, work: Callable[[], T]) -> T:
        """Do `work` on the first rank of each node; return the result of this node. A collective."""
        done = self._do(work, self._is_first)
        return next(each.value for each in done if each.node == self._node)  # type: ignore[no-any-return]

    def on_all(self, work: Callable[[], T]) -> T:
        """Do `work` on every rank; return the result of this rank. Values do not cross. A collective."""
        kept: list[T] = []
        self._do(lambda: kept.append(work()), True)
        return kept[0]

    def _do(self, work: Callable[[], Any], does: bool) -> list[_RankOutcome]:
        """Return the outcomes of the ranks that did the work, by rank; raise the first error."""
        value, raised = None, None
        try:
            value = work() if does else None
        except Exception as error:
            raised = error
        outcome = _RankOutcome(self._node, does, None if raised else value, *_described(raised))
        outcomes = [_RankOutcome(*each) for each in self.ranks.gather(tuple(outcome))]
        failed = next((each for each in outcomes if each.error), None)
        if failed is None:
            return [each for each in outcomes if each.did]
        if raised is not None and _described(raised) == (failed.error, failed.message):
            raise raised
        raise _error(failed)


def _described(error: Exception | None) -> tuple[str, str]:
    return ("", "") if error is None else (type(error).__name__, str(error))


def _error(outcome: _RankOutcome) -> Exception:
    """Return another rank's error: of the same class if that is one of ours, made of a message."""
    kind = getattr(errors, outcome.error, None)
    if isinstance(kind, type) and issubclass(kind, UnifiedError):
        try:
            return kind(outcome.message)
        except TypeError:  # it needs more than a message
            return UnifiedError(outcome.message)
    return UnifiedError(f"{outcome.error} on another rank: {outcome.message}")
