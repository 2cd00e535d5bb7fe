"""Base classes of all records (messages, specifications, events, actions), and of what a ``with`` block closes."""

from __future__ import annotations

from typing import Self

import msgspec


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen record: keyword-only, immutable, compared by content."""


class ClosedOnExit:
    """Object that a ``with`` block closes at its end."""

    def close(self) -> None:
        """Release what is open."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
