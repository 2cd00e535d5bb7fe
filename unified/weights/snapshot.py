"""One complete version as its reader has it, and how it gets into a model: all of it, or an error before anything."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch

from unified.errors import UsageError, WeightsMismatchError
from unified.weights.state_dict import unwrap
from unified.weights.transfer_plan import Manifest

MAX_NAMED = 10


class VersionedStateDict(OrderedDict[str, Any]):
    """A state dict as torch knows it, and the number of its version.

    Its tensors are for reading: everybody in this process who asks for this version gets the same. ``.clone()`` one to
    change it. They stay as they are, and in memory, as long as they are referred to, whatever comes later.
    """

    version: int
    _metadata: Any


def assemble(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> VersionedStateDict:
    """The state dict of a manifest, whose entries' values are `tensors`."""
    state = VersionedStateDict()
    for key in manifest.keys:
        if key in manifest.others:
            state[key] = manifest.others[key]
        else:
            state[key] = tensors[manifest.aliases.get(key, key)]
    state.version = manifest.version
    if manifest.metadata is not None:
        state._metadata = manifest.metadata
    return state


def load(
    state: VersionedStateDict, target: torch.nn.Module | MutableMapping[str, Any], *, strict: bool, what: str
) -> None:
    """Copy a version into the parameters and buffers of a model, or into the tensors of its state dict.

    A tensor of `target` that is sharded (a DTensor) takes its own part; nobody else is asked for that.

    Args:
        strict: the keys must be the same on both sides.
        what: the version in words, for errors.

    Raises:
        WeightsMismatchError: keys or shapes differ. Nothing was changed.
        UsageError: `target` is neither.
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
    """`state` with its tensors laid out as those of `own` are."""
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
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(mine, module.DTensor) or not isinstance(value, torch.Tensor):
        return value
    # Every rank has the whole tensor, so each cuts its own part out of it: no collective.
    whole = value.to(mine.device, dtype=mine.dtype)
    return module.distribute_tensor(whole, mine.device_mesh, mine.placements, src_data_rank=None)


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
    """Between tensors of one kind a copy casts without losing more than precision."""
    return tensor.is_floating_point(), tensor.is_complex()


def _named(fault: str, keys: Iterable[str]) -> list[str]:
    found = list(keys)
    if not found:
        return []
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return [f"{fault}: {', '.join(found[:MAX_NAMED])}{more}"]
