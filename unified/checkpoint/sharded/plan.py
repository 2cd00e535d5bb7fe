"""The plan of a save by several ranks, made by torch.distributed.checkpoint: the pieces that each rank writes."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful

from unified.checkpoint.sharded.index import OF_RANK, IndexEntry
from unified.checkpoint.sharded.payload import PlannedPiece, stored
from unified.errors import UsageError
from unified.rounds.rank_group import Ranks
from unified.tensors.host_buffers import BufferPool, nbytes_of, stage_state

SMALL_BYTES = 1 << 20
"""Up to this size, a piece that several ranks have is written by the first of them: a load finds small pieces together.
Larger pieces are spread over the ranks, and only their layouts are compared between ranks."""
PlanWords = dict[str | None, int]
"""A rank's words about its last plan: a checksum of each group of values, and under None the number of the plan."""


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

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._cached: _CachedPlan | None = None
        self._planner = DefaultSavePlanner()
        self._local = SavePlan([])
        self._checksums: dict[str, int] = {}
        self._groups: dict[str, str] = {}

    def look_at(self, state: Mapping[str, Any], ranks: Ranks) -> PlanWords | None:
        """Begin the plan of a save; return words about the last plan, or None if this rank cannot reuse it."""
        self._planner = DefaultSavePlanner()
        self._planner.set_up_planner(expanded(state), is_coordinator=ranks.rank == 0)
        self._local = self._planner.create_local_plan()
        self._checksums = self._checksummed() if ranks.size > 1 else {}
        cached = self._cached
        if cached is None or cached.place != (ranks.rank, ranks.size) or cached.local != self._local:
            return None
        words: PlanWords = {None: cached.number}
        for name, group in self._groups.items():
            if name in self._checksums:
                words[group] = crc32(b"%d" % self._checksums[name], words.get(group, 0))
        return words

    def settle(self, words: list[PlanWords | None], ranks: Ranks) -> None:
        """Agree on the plan: the cached one, if all ranks have it and no other values differ now. A collective."""
        pairs = {pair for each in words if each for pair in each.items()}
        if self._cached is not None and None not in words and len(pairs) == len(dict(pairs)):
            self._set_apart(ranks.rank)
            return
        self._cached = None
        self._groups = groups_of(ranks.gather(self._checksums))
        self._set_apart(ranks.rank)
        plans = shared_out(ranks.gather(self._planner.create_local_plan()))
        plans, metadata = self._planner.create_global_plan(plans)
        number = max((each[None] for each in words if each), default=-1) + 1
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

    def _checksummed(self) -> dict[str, int]:
        """Return the checksums of the values that other ranks may have too; of a large tensor that of its layout."""
        found: dict[str, tuple[bytes, torch.Tensor | bytes]] = {}
        for item in self._local.items:
            if item.type != WriteItemType.SHARD:
                layout = f"{data.properties.dtype} {data.size}".encode() if (data := item.tensor_data) else b""
                is_large = nbytes_of(self._planner.lookup_object(item.index)) > SMALL_BYTES
                found[item.index.fqn] = layout, b"" if is_large else self._piece(item).data
        copy = stage_state(found, self._pool)
        copy.wait()
        checksums = {name: crc32(stored(data)[0], crc32(layout)) for name, (layout, data) in copy.value.items()}
        copy.release()
        return checksums

    def _set_apart(self, rank: int) -> None:
        """Rename this rank's values that are in no group because they differ by rank."""
        values = self._planner.state_dict
        paths = self._planner.mappings = dict(self._planner.mappings)  # `_local` keeps the old ones
        for name in self._checksums.keys() - self._groups.keys():
            values[f"{name}{OF_RANK}{rank}"] = values.pop(name)
            paths[f"{name}{OF_RANK}{rank}"] = (*paths.pop(name), rank)  # as if the state had a list of all

    def _piece(self, item: WriteItem) -> PlannedPiece:
        data = self._planner.resolve_data(item)
        if isinstance(data, io.BytesIO):
            return PlannedPiece(item.index.fqn, None, [], data.getvalue())
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        return PlannedPiece(item.index.fqn, list(chunk.offsets), list(chunk.sizes), data.detach())


def groups_of(checksums: list[dict[str, int]]) -> dict[str, str]:
    """Return a group for each value that does not differ by rank: all values that the same ranks have are one group."""
    found: dict[str, dict[int, int]] = {}
    for rank, each in enumerate(checksums):
        for name, checksum in each.items():
            found.setdefault(name, {})[rank] = checksum
    groups: dict[tuple[int, ...], str] = {}
    return {name: groups.setdefault(tuple(by), name) for name, by in found.items() if len(set(by.values())) == 1}


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
            having, data = holders[item.index], item.tensor_data
            nbytes = data.chunk.sizes.numel() * data.properties.dtype.itemsize if data else 0
            rank = having[0] if nbytes <= SMALL_BYTES else min(having, key=lambda each: loads[each])
            chosen[item.index] = rank
            loads[rank] += nbytes
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if chosen[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]
