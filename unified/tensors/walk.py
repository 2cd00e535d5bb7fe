"""Tensors in a state: which there are, which are tied, and of which each rank has a part."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch


def tensors_in(tree: Any, *, in_modules: bool = False) -> Iterator[torch.Tensor]:
    """Yield every tensor in containers, with `in_modules` also the parameters of modules, once for each occurrence."""
    pending, seen = [tree], set[int]()
    while pending:
        node = pending.pop()
        if isinstance(node, torch.Tensor):
            yield node
        elif in_modules and isinstance(node, torch.nn.Module):
            pending.extend(node.parameters())
        elif isinstance(node, Mapping | list | tuple) and id(node) not in seen:
            seen.add(id(node))
            pending.extend(node.values() if isinstance(node, Mapping) else node)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is no more than dense numbers in memory."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_quantized
        and not is_lazy(tensor)
    )


def is_lazy(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's memory holds its values conjugated or negated."""
    return tensor.is_conj() or tensor.is_neg()


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is a DTensor, of which each rank has a part."""
    # The module takes long to import. Where nobody imported it, there is no DTensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a sharded tensor; any other tensor itself."""
    return cast(torch.Tensor, tensor.to_local() if is_sharded(tensor) else tensor)


def identity_of(tensor: torch.Tensor) -> object:
    """Return a key that is equal for tied tensors: one memory, seen in one way. A sharded tensor has the key of its
    local part, also on a rank whose part is empty.
    """
    local = local_part(tensor)
    storage = local.untyped_storage()._cdata
    view = (local.storage_offset(), local.dtype, tuple(tensor.shape), local.stride(), local.is_conj(), local.is_neg())
    return (storage, *view, type(tensor))
