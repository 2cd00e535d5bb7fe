"""The ranks that save and load together, and how they agree: small objects over torch.distributed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from unified.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, UsageError

T = TypeVar("T")
_OURS: dict[str, type[Exception]] = {
    each.__name__: each for each in (CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, UsageError)
}


class Ranks(Protocol):
    """Who saves or loads together.

    Attributes:
        rank: of this process among them.
        size: how many they are.
    """

    rank: int
    size: int

    def gather(self, value: Any) -> list[Any]:
        """What each rank gave, by rank. A collective."""
        ...


class Alone:
    """One rank that needs nobody."""

    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any]:
        return [value]


class RankGroup:
    """The ranks of a process group; None: of the default one."""

    def __init__(self, group: Any = None) -> None:
        from torch import distributed

        self._group = group
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)
        if self.rank < 0:
            raise UsageError("This process is no member of the process group whose ranks save and load together.")

    def gather(self, value: Any) -> list[Any]:
        from torch import distributed

        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value, group=self._group)
        return found


def ranks_here(group: Any = None) -> Ranks:
    """The ranks of this process's group, or itself by itself where torch.distributed was not set up."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return RankGroup(group)
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
    value, error = _tried(work) if ranks.rank == 0 else (None, None)
    value, said = ranks.gather((value, _said(error)))[0]
    if error is not None:
        raise error
    if said is not None:
        raise _error(*said)
    return value  # type: ignore[no-any-return]


def each_does(ranks: Ranks, work: Callable[[], T]) -> T:
    """Every rank does `work`; where one fails, all raise. A collective.

    Raises:
        CheckpointCorruptError: the same on every rank, where damage is all that was wrong.
        Exception: this rank's own, if it has one; a CheckpointError that names the rank otherwise.
    """
    value, error = _tried(work)
    everybody = ranks.gather(_said(error))
    is_damage = isinstance(error, CheckpointCorruptError)
    if error is not None and not is_damage:
        raise error
    failed = {rank: said for rank, said in enumerate(everybody) if said is not None}
    for rank, (name, text) in failed.items():
        if name != CheckpointCorruptError.__name__:
            raise CheckpointError(f"Rank {rank} failed, so no rank goes on: {name}: {text}")
    if failed:
        first = min(failed)
        raise CheckpointCorruptError(failed[first][1]) from error
    return value  # type: ignore[return-value]


def _tried(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _said(error: Exception | None) -> tuple[str, str] | None:
    return None if error is None else (type(error).__name__, str(error))


def _error(name: str, text: str) -> Exception:
    return _OURS[name](text) if name in _OURS else CheckpointError(f"Rank 0 failed: {name}: {text}")
