"""The base of all records: messages, specifications, events and actions."""

from __future__ import annotations

import msgspec


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen record: keyword-only, immutable, compared by content."""
