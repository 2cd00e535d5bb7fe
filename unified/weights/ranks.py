"""The ranks that send a model together, and how they agree: small objects over torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as distributed
from torch.distributed.device_mesh import DeviceMesh

from unified.errors import UsageError, WeightsError, WeightsTimeoutError, WeightsVersionError
from unified.weights.state_dict import Source
from unified.worker import rank_group
from unified.worker.rank_group import Alone, Ranks, WholeGroup

T = TypeVar("T")
_OURS: dict[str, type[WeightsError]] = {
    each.__name__: each for each in (WeightsError, WeightsTimeoutError, WeightsVersionError)
}


class OfMesh:
    """The ranks of a device mesh, which may be fewer than those of the job."""

    def __init__(self, mesh: DeviceMesh) -> None:
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise UsageError("sync_weights was called on a rank that has no part of the model: it is not in its mesh.")
        self._mesh = mesh
        self.rank = 0
        for position, length in zip(coordinate, mesh.shape, strict=True):
            self.rank = self.rank * length + position
        self.size = mesh.size()

    def share(self, value: Any) -> Any:
        box = [value]
        for dim in range(self._mesh.ndim):  # along each dimension from its first rank: after the last, everybody has it
            group = self._mesh.get_group(dim)
            distributed.broadcast_object_list(box, src=distributed.get_global_rank(group, 0), group=group)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        found = [value]
        for dim in reversed(range(self._mesh.ndim)):
            group = self._mesh.get_group(dim)
            parts: list[Any] = [None] * distributed.get_world_size(group)
            distributed.all_gather_object(parts, found, group=group)
            found = [each for part in parts for each in part]
        return found


def ranks_for(source: Source, *, together: bool) -> Ranks:
    """Who calls: the ranks that a sharded model lies on, all ranks of a replicated one, or this process by itself.

    Raises:
        UsageError: `together`, and there is no process group.
    """
    if not (together or source.is_sharded):
        return Alone()
    if not (distributed.is_available() and distributed.is_initialized()):
        raise UsageError(
            "sync_weights was to be called by all ranks together, and this process is in no process group."
        )
    mesh = source.mesh
    if mesh is not None and mesh.size() != distributed.get_world_size():
        return OfMesh(mesh)
    return WholeGroup()


def lead(ranks: Ranks, work: Callable[[], T]) -> T:
    """Rank 0 does `work`; every rank returns what it returned, or raises what it raised. A collective."""
    return rank_group.lead(ranks, work, _error)


def _error(name: str, text: str) -> Exception:
    return _OURS[name](text) if name in _OURS else WeightsError(f"{name}: {text}")
