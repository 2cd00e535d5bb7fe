"""Agreement of the ranks of a round on the step from which they go on, and on the source of each rank's state."""

from __future__ import annotations

from collections.abc import Sequence

from unified.values import Value


class Holding(Value, frozen=True, kw_only=True):
    """State of a replicated model that one rank has as its round begins."""

    rank: int
    step: int = 0
    """Last step that it committed."""
    is_whole: bool = False
    """True if it has the state of that step: its process took part before, and no later update has touched it."""
    reason: str = ""
    """Reason why the rank's last round ended; empty if it took part in none."""


class StepAgreement(Value, frozen=True, kw_only=True):
    """Step from which all ranks go on."""

    step: int | None
    """Newest step that some rank has whole; None: the state comes from a snapshot or a checkpoint."""
    sources: dict[int, int] = {}
    """Rank from which each rank without the state takes it."""
    reason: str = ""

    def receivers(self, rank: int) -> list[int]:
        """Return the ranks to which this one gives the state, in the order in which it serves them."""
        return sorted(receiver for receiver, source in self.sources.items() if source == rank)


def agree(holdings: Sequence[Holding]) -> StepAgreement:
    """Agree on the newest step that a rank has whole.

    Replicas of one step are equal. The ranks that have it serve the other ranks in turn, the lowest first.
    """
    reason = next((each.reason for each in holdings if each.reason), "")
    steps = [each.step for each in holdings if each.is_whole]
    if not steps:
        return StepAgreement(step=None, reason=reason)
    step = max(steps)
    has_it = sorted(each.rank for each in holdings if each.is_whole and each.step == step)
    lacks_it = sorted({each.rank for each in holdings} - set(has_it))
    sources = {rank: has_it[index % len(has_it)] for index, rank in enumerate(lacks_it)}
    return StepAgreement(step=step, sources=sources, reason=reason)
