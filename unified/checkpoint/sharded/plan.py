"""The plan of a save by several ranks, made by torch.distributed.checkpoint: the pieces that each rank writes."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.stateful import Stateful

from unified.checkpoint.sharded.index import IndexEntry
from unified.errors import UsageError
from unified.rounds.rank_group import Ranks

SMALL_BYTES = 1 << 20
"""Up to this size, a piece that several ranks have is written by the first of them: a load finds small pieces together.
Larger pieces are spread over the ranks."""


@dataclass(frozen=True)
class PlannedPiece:
    """A tensor or an object that this rank writes."""

    name: str
    offsets: list[int] | None
    """Indices of its beginning in the whole tensor; None: an object."""
    sizes: list[int]
    data: torch.Tensor | bytes


@dataclass(frozen=True)
class _CachedPlan:
    """A plan that is used again until the layout of some rank's state changes."""

    number: int
    place: tuple[int, int]
    local: SavePlan
    mine: SavePlan
    entries: dict[str, IndexEntry]


class ShardPlanner:
    """Plans saves. While the layout of the state stays the same, it reuses the last plan: ranks exchange few words."""

    def __init__(self) -> None:
        self._cached: _CachedPlan | None = None
        self._planner = DefaultSavePlanner()
        self._local = SavePlan([])

    def look_at(self, state: Mapping[str, Any], ranks: Ranks) -> int | None:
        """Begin the plan of a save; return the number of the last plan if this rank can reuse it, else None."""
        self._planner = DefaultSavePlanner()
        self._planner.set_up_planner(expanded(state), is_coordinator=ranks.rank == 0)
        self._local = self._planner.create_local_plan()
        cached = self._cached
        is_same = cached is not None and cached.place == (ranks.rank, ranks.size) and cached.local == self._local
        return cached.number if cached is not None and is_same else None

    def settle(self, numbers: list[int | None], ranks: Ranks) -> None:
        """Agree on the plan: the cached one, if all ranks know it by the same number. A collective."""
        if numbers[0] is not None and len(set(numbers)) == 1:
            return
        self._cached = None
        plans = shared_out(ranks.gather(self._local))
        plans, metadata = self._planner.create_global_plan(plans)
        number = max((number for number in numbers if number is not None), default=-1) + 1
        self._cached = _CachedPlan(number, (ranks.rank, ranks.size), self._local, plans[ranks.rank], _entries(metadata))

    def pieces(self) -> list[PlannedPiece]:
        """Return the pieces that this rank writes: tensors of the state, objects as bytes."""
        assert self._cached is not None
        return [self._piece(item) for item in self._cached.mine.items]

    def entries(self) -> dict[str, IndexEntry]:
        """Return the entries of the whole state, of all ranks."""
        assert self._cached is not None
        return self._cached.entries

    def forget_state(self) -> None:
        """Drop the references to the user's tensors."""
        self._planner = DefaultSavePlanner()

    def _piece(self, item: WriteItem) -> PlannedPiece:
        data = self._planner.resolve_data(item)
        if isinstance(data, io.BytesIO):
            return PlannedPiece(item.index.fqn, None, [], data.getvalue())
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        return PlannedPiece(item.index.fqn, list(chunk.offsets), list(chunk.sizes), data.detach())


def _entries(metadata: Metadata) -> dict[str, IndexEntry]:
    found = {}
    for name, kind in metadata.state_dict_metadata.items():
        path = list(metadata.planner_data[name])
        if isinstance(kind, TensorStorageMetadata):
            dtype = str(kind.properties.dtype).removeprefix("torch.")
            found[name] = IndexEntry(path=path, dtype=dtype, size=list(kind.size))
        else:
            found[name] = IndexEntry(path=path)
    return found


def expanded(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict, with each module and optimizer at the top level replaced by its own state dict."""
    if not isinstance(state, Mapping):
        raise UsageError(f"A state that ranks save or load together must be a dict, not a {type(state).__name__}.")
    return {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()}


def shared_out(plans: list[SavePlan]) -> list[SavePlan]:
    """Return the plans with each item in the plan of exactly one rank."""
    holders: dict[Any, list[int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
    loads = [0] * len(plans)
    chosen: dict[Any, int] = {}
    for plan in plans:
        for item in plan.items:
            if item.index in chosen:
                continue
            having, nbytes = holders[item.index], _nbytes(item)
            rank = having[0] if nbytes <= SMALL_BYTES else min(having, key=lambda each: loads[each])
            chosen[item.index] = rank
            loads[rank] += nbytes
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if chosen[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]


def _nbytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
