"""How a put or a get ended."""

from __future__ import annotations

from enum import IntEnum


class Outcome(IntEnum):
    """Numbers, because they travel and are kept in journals: they must not change."""

    DONE = 0
    """All items are in; or, here are items."""
    WAITING = 1
    """Time is over and nothing was given up: ask again. A put keeps its place in the line."""
    FULL = 2
    """The put's time is over, and what had not gone in was dropped."""
    CLOSED = 3
    UNKNOWN = 4
    """The handle has to attach first: this owner does not know it. Or its life is over."""
