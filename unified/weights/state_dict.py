"""State dicts: the model that is sent, and the complete version that a reader loads into a model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from unified.bus.codec.tensors import is_dense
from unified.errors import UsageError, WeightsMismatchError, listed
from unified.tensors.walk import identity_of, is_sharded, local_part
from unified.weights.transfer_plan import Bucket, TensorEntry, TransferPlan, cut, digest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_COMPILED = "_orig_mod"


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside DistributedDataParallel, DataParallel and torch.compile, which prefix its keys."""
    while True:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            module = module.module
        elif isinstance(getattr(module, _COMPILED, None), torch.nn.Module):
            module = getattr(module, _COMPILED)
        else:
            return module


def is_replicated(weights: object) -> bool:
    """Return whether `weights` is a DistributedDataParallel model: each rank of the process group has the same copy."""
    module = weights
    while isinstance(getattr(module, _COMPILED, None), torch.nn.Module):
        module = getattr(module, _COMPILED)
    return isinstance(module, torch.nn.parallel.DistributedDataParallel)


class OutgoingStateDict:
    """A state dict, to be sent.

    Args:
        weights: a module, or a state dict of one.
        dtype: floating-point tensors are cast to it; None: no cast.
    """

    def __init__(self, weights: torch.nn.Module | Mapping[str, Any], dtype: torch.dtype | None = None) -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise UsageError(f"dtype={dtype!r}: a floating-point dtype of torch is wanted, such as torch.bfloat16.")
        state = unwrap(weights).state_dict() if isinstance(weights, torch.nn.Module) else weights
        if not isinstance(state, Mapping):
            raise UsageError(f"sync_weights takes a torch module or its state dict, not a {type(weights).__name__}.")
        self._dtype = dtype
        self._tensors: dict[str, torch.Tensor] = {}
        self.entries: list[TensorEntry] = []
        self.aliases: dict[str, str] = {}
        self.others: dict[str, Any] = {}
        self.keys = tuple(state)
        self.metadata = getattr(state, "_metadata", None)
        seen: dict[object, str] = {}
        for key, value in state.items():
            if not isinstance(key, str):
                raise UsageError(f"the key {key!r} of the state dict is no string.")
            self._add(key, value, seen)

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh that all sharded tensors lie on; None if there are none, or they differ."""
        meshes: list[DeviceMesh] = [tensor.device_mesh for tensor in self._tensors.values() if is_sharded(tensor)]  # type: ignore[attr-defined]
        return meshes[0] if meshes and all(mesh == meshes[0] for mesh in meshes) else None

    @property
    def is_sharded(self) -> bool:
        return any(entry.is_sharded for entry in self.entries)

    def cut(self, bucket_bytes: int, num_ranks: int) -> tuple[Bucket, ...]:
        return cut(self.entries, bucket_bytes, num_ranks)

    def digest(self, buckets: Sequence[Bucket]) -> str:
        return digest(buckets, self.aliases, self.others)

    @torch.no_grad()
    def collect(self, entry: TensorEntry) -> torch.Tensor:
        """Return the tensor itself; gather a sharded one, which is a collective of all its ranks. Only a sharded one is
        cast, before it is gathered: fewer bytes travel then."""
        tensor = self._tensors[entry.key]
        if not entry.is_sharded:
            return tensor
        cast = tensor.to(getattr(torch, entry.dtype))
        whole: torch.Tensor = cast.full_tensor()  # type: ignore[attr-defined]  # of a DTensor
        return whole

    def is_models(self, entry: TensorEntry, tensor: torch.Tensor) -> bool:
        """Return whether a collected tensor is the model's own memory, and no copy."""
        own = local_part(self._tensors[entry.key])
        return bool(tensor.untyped_storage()._cdata == own.untyped_storage()._cdata)

    def _add(self, key: str, value: Any, seen: dict[object, str]) -> None:
        if not isinstance(value, torch.Tensor):
            self.others[key] = value
            return
        tensor = value.detach()
        if tensor.is_meta:
            raise UsageError(f"tensor {key!r} is on the meta device and has no values to send.")
        has_parts = is_sharded(tensor)
        if not has_parts and (type(tensor) is not torch.Tensor or not is_dense(torch, tensor)):
            self.others[key] = tensor  # sparse, quantized, or of a library's own class: pickled
            return
        first = seen.setdefault(identity_of(tensor), key)
        if first != key:
            self.aliases[key] = first
            return
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        nbytes = tensor.numel() * dtype.itemsize
        self._tensors[key] = tensor
        self.entries.append(TensorEntry(key, str(dtype).removeprefix("torch."), tuple(tensor.shape), nbytes, has_parts))


def check_bucket(plan: TransferPlan, index: int, tensors: Sequence[object]) -> list[torch.Tensor]:
    """Return the tensors of a received bucket; raise UsageError if the plan announced others."""
    entries = plan.buckets[index].entries
    found = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    for entry, tensor in zip(entries, found, strict=False):
        if tuple(tensor.shape) != entry.shape or str(tensor.dtype) != f"torch.{entry.dtype}":
            raise UsageError(
                f"bucket {index} of version {plan.version} holds a {tensor.dtype} of shape {list(tensor.shape)} "
                f"where {entry.key!r}, a {entry.dtype} of shape {list(entry.shape)}, was announced."
            )
    if not len(found) == len(tensors) == len(entries):
        raise UsageError(f"bucket {index} of version {plan.version} holds {len(found)} of {len(entries)} tensors.")
    return found


MAX_NAMED = 10


class VersionedStateDict(OrderedDict[str, Any]):
    """A state dict as torch knows it, and the number of its version.

    Do not change its tensors: all readers of this version in this process share them. ``.clone()`` one to change it.
    They stay unchanged and in memory as long as they are referred to, also when newer versions come.
    """

    version: int
    _metadata: Any


def assemble(plan: TransferPlan, tensors: Mapping[str, torch.Tensor]) -> VersionedStateDict:
    """Return the state dict of a plan, whose entries' values are `tensors`."""
    state = VersionedStateDict()
    for key in plan.keys:
        if key in plan.others:
            state[key] = plan.others[key]
        else:
            state[key] = tensors[plan.aliases.get(key, key)]
    state.version = plan.version
    if plan.metadata is not None:
        state._metadata = plan.metadata
    return state


def load(
    state: VersionedStateDict, target: torch.nn.Module | MutableMapping[str, Any], *, strict: bool, what: str
) -> None:
    """Copy a version into the parameters and buffers of a model, or into the tensors of its state dict.

    A sharded tensor of `target` (a DTensor) takes its own part, without communication.

    Args:
        strict: the keys must be the same on both sides.
        what: the version in words, for errors.
    """
    if isinstance(target, torch.nn.Module):
        module = unwrap(target)
        own = module.state_dict()
        _check(state, own, strict=strict, what=f"{what} does not fit {type(module).__name__}")
        module.load_state_dict(_matched(state, own, keep_rest=True), strict=strict)
    elif isinstance(target, MutableMapping):
        _check(state, target, strict=strict, what=f"{what} does not fit the state dict")
        with torch.no_grad():
            for key, value in _matched(state, target, keep_rest=False).items():
                mine = target[key]
                if isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor):
                    mine.copy_(value)
                else:
                    target[key] = value
    else:
        raise UsageError(f"load_into takes a torch module or its state dict, not a {type(target).__name__}.")


def _matched(state: VersionedStateDict, own: Mapping[str, Any], *, keep_rest: bool) -> VersionedStateDict:
    """Return `state` with its tensors sharded like those of `own`."""
    matched = VersionedStateDict()
    for key, value in state.items():
        if key in own:
            matched[key] = _sharded_like(own[key], value)
        elif keep_rest:
            matched[key] = value
    if hasattr(state, "_metadata"):
        matched._metadata = state._metadata
    return matched


def _sharded_like(mine: Any, value: Any) -> Any:
    if not is_sharded(mine) or not isinstance(value, torch.Tensor):
        return value
    from torch.distributed.tensor import distribute_tensor

    # Every rank has the whole tensor, so each cuts its own part out of it: no collective.
    whole = value.to(mine.device, dtype=mine.dtype)
    return distribute_tensor(whole, mine.device_mesh, mine.placements, src_data_rank=None)


def _check(state: Mapping[str, Any], own: Mapping[str, Any], *, strict: bool, what: str) -> None:
    faults = []
    if strict:
        faults += _named("missing in the weights", [key for key in own if key not in state])
        faults += _named("unexpected", [key for key in state if key not in own])
    differing = [_differ(key, own[key], state[key]) for key in own if key in state]
    faults += _named("of another shape or kind", filter(None, differing))
    if faults:
        raise WeightsMismatchError(f"{what}: {'; '.join(faults)}. Nothing was changed.")


def _differ(key: str, mine: Any, value: Any) -> str:
    if not isinstance(mine, torch.Tensor) or not isinstance(value, torch.Tensor):
        if isinstance(mine, torch.Tensor) != isinstance(value, torch.Tensor):
            return f"{key} (here a {type(mine).__name__}, sent a {type(value).__name__})"
        return ""
    if mine.shape != value.shape:
        return f"{key} (here {list(mine.shape)}, sent {list(value.shape)})"
    if _kind(mine) != _kind(value):
        return f"{key} (here {mine.dtype}, sent {value.dtype})"
    return ""


def _kind(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Return the kind of a tensor: a copy between tensors of one kind loses no more than precision."""
    return tensor.is_floating_point(), tensor.is_complex()


def _named(fault: str, keys: Iterable[str]) -> list[str]:
    found = list(keys)
    return [f"{fault}: {listed(found, MAX_NAMED)}"] if found else []
