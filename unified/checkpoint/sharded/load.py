"""Loading into a state dict; the ranks that load may differ from the ranks that saved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.checkpoint.stateful import Stateful

from unified.checkpoint.manifest import Kind, Manifest
from unified.checkpoint.payload import decompress
from unified.checkpoint.sharded.index import INDEX, OF_RANK, IndexEntry, Shard, decode_index, rank_file, read_shards
from unified.checkpoint.sharded.payload import restored
from unified.checkpoint.sharded.plan import expanded
from unified.checkpoint.state_stream import load_state
from unified.checkpoint.store import MAX_NAMED, RANK_ERRORS, CheckpointStore
from unified.errors import CheckpointCorruptError, CheckpointError, listed
from unified.rounds.rank_group import Ranks, each_does, lead


class Origin(Protocol):
    """A source that a state is filled from."""

    metadata: Metadata

    def fetch(self, wanted: Collection[MetadataIndex]) -> Iterator[tuple[MetadataIndex, Any]]:
        """Yield pieces of tensors, and objects, in any order."""
        ...


class ShardOrigin:
    """A sharded checkpoint, whose index is `index`."""

    def __init__(
        self, store: CheckpointStore, manifest: Manifest, index: Mapping[str, IndexEntry], *, weights_only: bool
    ) -> None:
        self._store = store
        self._manifest = manifest
        self._index = index
        self._weights_only = weights_only
        self._shards = {
            MetadataIndex(name, shard.offsets): shard for name, entry in index.items() for shard in entry.shards
        }
        self.metadata = Metadata({name: _storage(entry) for name, entry in index.items()})

    def fetch(self, wanted: Collection[MetadataIndex]) -> Iterator[tuple[MetadataIndex, Any]]:
        parts = {part.name: part for part in self._manifest.parts}
        by_rank: dict[int, list[MetadataIndex]] = {}
        for index in wanted:
            by_rank.setdefault(self._shards[index].rank, []).append(index)
        for rank, indices in sorted(by_rank.items()):
            part = parts[rank_file(rank, "bin")]
            shards = {id(self._shards[index]): index for index in indices}
            for shard, data in read_shards(self._store, part, [self._shards[index] for index in indices]):
                index = shards[id(shard)]
                yield index, self._restored(index, shard, data)

    def _restored(self, index: MetadataIndex, shard: Shard, data: bytearray) -> Any:
        entry = self._index[index.fqn]
        dtype = getattr(torch, entry.dtype) if entry.dtype else None
        plain = decompress(data, self._manifest.compression)
        plain = plain if isinstance(plain, bytearray) else bytearray(plain)
        try:
            return restored(plain, shard, dtype, weights_only=self._weights_only)
        except Exception as error:
            hint = " If you trust who saved it, load it with weights_only=False." if self._weights_only else ""
            raise CheckpointError(f"torch cannot load {index.fqn!r} of the checkpoint: {error}{hint}") from error


class TreeOrigin:
    """A whole state that is in memory."""

    def __init__(self, tree: Any) -> None:
        if not isinstance(tree, dict):
            raise CheckpointError(f"The checkpoint is a {type(tree).__name__}, not a state dict; use load_state(step).")
        self._planner = DefaultSavePlanner()
        self._planner.set_up_planner(tree, is_coordinator=True)
        _, self.metadata = self._planner.create_global_plan([self._planner.create_local_plan()])

    def fetch(self, wanted: Collection[MetadataIndex]) -> Iterator[tuple[MetadataIndex, Any]]:
        for index in wanted:
            yield index, self._planner.lookup_object(index)


class _FillPlanner(DefaultLoadPlanner):
    """A planner that puts objects, already deserialized, into the state dict."""

    def set_object(self, item: ReadItem, value: Any) -> None:
        *path, last = self.mappings[item.dest_index.fqn]
        node: Any = self.original_state_dict
        for key in path:
            node = node[_own_key(node, key)]
        node[_own_key(node, last)] = value


def load_into(
    store: CheckpointStore, state: dict[str, Any], ranks: Ranks, *, weights_only: bool, of_rank: int | None
) -> dict[Kind, Callable[[Manifest], None]]:
    """Return readers for `CheckpointReader.load` that fill a state dict in place. Each is a collective."""
    expanded(state)  # raises if the state is no dict, before anything is read

    def fill(manifest: Manifest, origin: Origin) -> dict[str, Any]:
        for key, value in state.items():
            if isinstance(value, torch.optim.Optimizer):
                _prepare(value, any(name.startswith(f"{key}.state.") for name in origin.metadata.state_dict_metadata))
        plain = expanded(state)
        _fill(plain, origin, manifest, is_first=ranks.rank == 0)
        return plain

    def fill_from(manifest: Manifest, origin: Callable[[Manifest], Origin]) -> None:
        plain = each_does(ranks, lambda: fill(manifest, origin(manifest)), RANK_ERRORS, shared=CheckpointCorruptError)
        for key, value in state.items():
            if isinstance(value, Stateful):
                value.load_state_dict(plain[key])
            else:
                state[key] = plain[key]

    def of_shards(manifest: Manifest) -> None:
        index = decode_index(lead(ranks, lambda: _index_data(store, manifest), RANK_ERRORS))
        own = ranks.rank if ranks.size == manifest.world_size else of_rank
        for rank in (of_rank, own):
            ending = f"{OF_RANK}{rank}"
            index |= {key.removesuffix(ending): each for key, each in index.items() if key.endswith(ending)}
        fill_from(manifest, lambda it: ShardOrigin(store, it, index, weights_only=weights_only))

    def whole(manifest: Manifest) -> Origin:
        return TreeOrigin(load_state(store.read(manifest), map_location="cpu", weights_only=weights_only))

    return {"sharded": of_shards, "state": partial(fill_from, origin=whole), "bytes": partial(fill_from, origin=whole)}


def whole_state(store: CheckpointStore, manifest: Manifest, *, map_location: Any, weights_only: bool) -> dict[str, Any]:
    """Load all of a sharded checkpoint in this process: a nest of dicts and lists, with whole tensors."""
    index = decode_index(_index_data(store, manifest))
    origin = ShardOrigin(store, manifest, index, weights_only=weights_only)
    device = map_location if isinstance(map_location, str | torch.device) else "cpu"
    found: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=getattr(torch, entry.dtype), device=device)
        for name, entry in index.items()
        if entry.dtype
    }
    wanted = [MetadataIndex(name, shard.offsets) for name, entry in index.items() for shard in entry.shards]
    for at, value in origin.fetch(wanted):
        if at.offset is None:
            found[at.fqn] = value
        else:
            _narrowed(found[at.fqn], at.offset, value.shape).copy_(value)
    nest: dict[str, Any] = {}
    for name, entry in index.items():
        _put(nest, entry.path, found[name])
    return nest


def _prepare(optimizer: torch.optim.Optimizer, has_state: bool) -> None:
    """Let a new optimizer take a step that changes nothing: before its first step it has no tensors to fill."""
    if has_state and not optimizer.state:
        _init_optim_state(optimizer)


def _fill(state: dict[str, Any], origin: Origin, manifest: Manifest, *, is_first: bool) -> None:
    planner = _FillPlanner()
    try:
        planner.set_up_planner(state, origin.metadata, is_first)
        names = origin.metadata.state_dict_metadata.keys()
        if own := {key.partition(OF_RANK)[0] for key in names if OF_RANK in key} & planner.state_dict.keys() - names:
            raise ValueError(
                f"each of the {manifest.world_size} ranks that saved it had its own {listed(sorted(own), MAX_NAMED)}; "
                "load on as many, name one with of_rank=, or leave these keys out (load_state gives all their values)"
            )
        plan = planner.finish_plan(planner.create_local_plan())
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"The checkpoint of step {manifest.step} does not fit the state that is to be loaded: {error}"
        ) from error
    wanted: dict[MetadataIndex, list[ReadItem]] = {}
    for item in plan.items:
        wanted.setdefault(item.storage_index, []).append(item)
    with torch.no_grad():
        for index, value in origin.fetch(wanted):
            for item in wanted[index]:
                if item.type == LoadItemType.BYTE_IO:
                    planner.set_object(item, value)
                    continue
                piece = _narrowed(value, item.storage_offsets, item.lengths)
                planner.resolve_tensor(item).detach().copy_(piece)


def _narrowed(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _storage(entry: IndexEntry) -> TensorStorageMetadata | BytesStorageMetadata:
    if not entry.dtype:
        return BytesStorageMetadata()
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=getattr(torch, entry.dtype)),
        size=torch.Size(entry.size),
        chunks=[
            ChunkStorageMetadata(torch.Size(shard.offsets or []), torch.Size(shard.sizes)) for shard in entry.shards
        ],
    )


def _index_data(store: CheckpointStore, manifest: Manifest) -> bytes:
    for part in manifest.parts:
        if part.name == INDEX:
            return bytes(store.read_part(part))
    raise CheckpointCorruptError("its manifest names no index")


def _own_key(node: Any, key: str | int) -> Any:
    """Return the key of `node` that the planner turned into the text `key`."""
    if isinstance(node, Mapping) and key not in node:
        return next((each for each in node if str(each) == key), key)
    return key


def _put(nest: dict[str, Any], path: Sequence[str | int], value: Any) -> None:
    """Set an element, making the dicts and lists on the way to it."""
    node: Any = nest
    for key, below in zip(path, [*path[1:], None], strict=True):
        if isinstance(key, int):
            node.extend([None] * (key + 1 - len(node)))
        is_there = node[key] is not None if isinstance(key, int) else key in node
        if below is None:
            node[key] = value
        elif not is_there:
            node[key] = [] if isinstance(below, int) else {}
        node = node[key]
