"""Who writes checkpoints, and who gives way when two write the same step. Pure."""

from __future__ import annotations

from typing import Literal

from unified.checkpoint.manifest import Manifest
from unified.values import Value

Judgement = Literal["write", "leave", "refuse"]


class Writer(Value, frozen=True, kw_only=True):
    """One life of a manager."""

    name: str
    """Host, process and a random word: no other life has it."""
    rank: int = 0
    world_size: int = 1


def judge(existing: Manifest | None, writer: Writer, *, is_older: bool) -> Judgement:
    """What a writer does with a step that may be there already.

    A run that went back to an older checkpoint saves the steps since then again: they replace those that an earlier
    life left, and its own. Data-parallel ranks that all save the same step have the same state: the first one's stays.
    Anybody else is another run that was pointed at the same place.

    Args:
        is_older: `existing` was there when the writer first looked. No clock tells, since two hosts' may differ.
    """
    if existing is None or existing.writer == writer.name or is_older:
        return "write"
    if existing.world_size == writer.world_size > 1 and existing.rank != writer.rank:
        return "leave"
    return "refuse"
