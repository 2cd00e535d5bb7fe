"""How a process asks that a dataset goes on from a position: which of its requests are new, and which said again."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Mapping
from typing import Any

from unified.data.position import ReadingPosition
from unified.protocol.coordinator import RestorePosition

_process = uuid.uuid4().hex
_numbers = itertools.count(1)


def restore_request(
    dataset_id: str, position: Mapping[str, Any], reader: Mapping[str, Any], *, world: list[str], is_first: bool
) -> RestorePosition:
    """The request.

    Args:
        position: what `ShardedDataset.state_dict` or `merge_positions` gave.
        reader: of which worker it is: `space`, `worker_id`, `session`, `life`.
        world: ids of all who read from now on; empty if they are not known.
        is_first: it counts only if this process has restored none of this dataset for that worker yet.

    Raises:
        UsageError: it is no position.
    """
    where = ReadingPosition()
    where.load(position)
    return RestorePosition(
        dataset_id=dataset_id,
        epoch=where.epoch,
        done=sorted(set(where.done)),
        begun=sorted((shard_id, offset) for shard_id, offset in where.state()["begun"]),
        world=world if reader["worker_id"] in world else [],
        process=_process,
        number=0 if is_first else next(_numbers),
        **reader,
    )


def _renew_after_fork() -> None:
    """A worker is a fork of a process that may have imported this already."""
    global _process
    _process = uuid.uuid4().hex


os.register_at_fork(after_in_child=_renew_after_fork)
