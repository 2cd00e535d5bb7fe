"""The ranks that save and load together, and how they agree: small objects over torch.distributed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from unified.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, UsageError
from unified.worker import rank_group
from unified.worker.rank_group import Alone, Ranks, WholeGroup, said, tried

T = TypeVar("T")
_OURS: dict[str, type[Exception]] = {
    each.__name__: each for each in (CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, UsageError)
}


def ranks_here(group: Any = None) -> Ranks:
    """The ranks of this process's group, or itself by itself where torch.distributed was not set up."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return WholeGroup(group)
    return Alone()


def is_sharded(state: Any) -> bool:
    """Whether a state has tensors of which each rank has a piece, also in modules."""
    if "torch.distributed.tensor" not in sys.modules:
        return False  # which is slow to import, and nobody has made any
    import torch
    from torch.distributed.tensor import DTensor

    pending, seen = [state], set[int]()
    while pending:
        node = pending.pop()
        if isinstance(node, DTensor):
            return True
        if isinstance(node, torch.nn.Module):
            pending.extend(node.parameters())
        elif isinstance(node, Mapping | list | tuple) and id(node) not in seen:
            seen.add(id(node))
            pending.extend(node.values() if isinstance(node, Mapping) else node)
    return False


def lead(ranks: Ranks, work: Callable[[], T]) -> T:
    """Rank 0 does `work`; every rank returns what it returned, or raises what it raised. A collective."""
    return rank_group.lead(ranks, work, _error)


def each_does(ranks: Ranks, work: Callable[[], T]) -> T:
    """Every rank does `work`; where one fails, all raise. A collective.

    Raises:
        CheckpointCorruptError: the same on every rank, where damage is all that was wrong.
        Exception: this rank's own, if it has one; a CheckpointError that names the rank otherwise.
    """
    value, error = tried(work)
    everybody = ranks.gather(said(error))
    is_damage = isinstance(error, CheckpointCorruptError)
    if error is not None and not is_damage:
        raise error
    failed = {rank: word for rank, word in enumerate(everybody) if word is not None}
    for rank, (name, text) in failed.items():
        if name != CheckpointCorruptError.__name__:
            raise CheckpointError(f"Rank {rank} failed, so no rank goes on: {name}: {text}")
    if failed:
        first = min(failed)
        raise CheckpointCorruptError(failed[first][1]) from error
    return value  # type: ignore[return-value]


def _error(name: str, text: str) -> Exception:
    return _OURS[name](text) if name in _OURS else CheckpointError(f"Rank 0 failed: {name}: {text}")
