"""What a queue says of itself."""

from __future__ import annotations

from unified.values import Value


class QueueStats(Value, frozen=True, kw_only=True):
    """A queue, at one moment. Rates are over about the last ten seconds."""

    name: str
    size: int
    """How many items it holds at most; those that are leased do not count."""
    depth: int
    """Items that wait to be taken."""
    nbytes: int
    """Of these, encoded."""
    leased: int
    """Items that a consumer has taken and is not done with."""
    num_put: int
    """Items that have gone in since the owner's life began."""
    num_taken: int
    """Items that were handed out since then, those that came back and went out again counted again."""
    puts_per_s: float
    """Items."""
    gets_per_s: float
    """Items."""
    oldest_age_s: float
    """Since the item that will be taken next was put; 0 when there is none."""
    waiting_producers: int
    """Puts that wait for room."""
    waiting_consumers: int
    """Gets that wait for an item."""
    handles: int
    """`DataQueue` objects that have used it and still may."""
    is_closed: bool
    is_durable: bool
