"""Groups of ranks that act together, and how they agree: small objects over torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from unified.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
ErrorFamily = Sequence[type[Exception]]
"""Errors that cross from rank to rank unchanged; the first replaces all others."""


class Ranks(Protocol):
    """A group of ranks.

    Attributes:
        rank: of this process in the group.
        size: number of ranks in the group.
    """

    rank: int
    size: int

    def share(self, value: Any) -> Any:
        """Return the value that rank 0 gave, on every rank. A collective."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Return the value that each rank gave, by rank. A collective."""
        ...


class Alone:
    """A group of one rank."""

    rank = 0
    size = 1

    def share(self, value: Any) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]


class WholeGroup:
    """Every rank of a process group; None: of the default one."""

    def __init__(self, group: Any = None) -> None:
        from torch import distributed

        self._group = group
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)
        if self.rank < 0:
            raise UsageError("This process is no member of the process group whose ranks act together.")
        self._first = 0 if group is None else distributed.get_global_rank(group, 0)

    def share(self, value: Any) -> Any:
        from torch import distributed

        box = [value]
        distributed.broadcast_object_list(box, src=self._first, group=self._group)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        from torch import distributed

        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value, group=self._group)
        return found


class MeshGroup:
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
        from torch import distributed

        box = [value]
        for dim in range(self._mesh.ndim):  # from the first rank of each dimension: after the last one all have it
            group = self._mesh.get_group(dim)
            distributed.broadcast_object_list(box, src=distributed.get_global_rank(group, 0), group=group)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        from torch import distributed

        found = [value]
        for dim in reversed(range(self._mesh.ndim)):
            group = self._mesh.get_group(dim)
            parts: list[Any] = [None] * distributed.get_world_size(group)
            distributed.all_gather_object(parts, found, group=group)
            found = [each for part in parts for each in part]
        return found


def ranks_here(group: Any = None) -> Ranks:
    """Return the ranks of this process's group, or itself alone where torch.distributed was not set up."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return WholeGroup(group)
    return Alone()


def lead(ranks: Ranks, work: Callable[[], T], errors: ErrorFamily) -> T:
    """Do `work` on rank 0; every rank returns its result, or raises its error. A collective."""
    value, error = _try(work) if ranks.rank == 0 else (None, None)
    value, failed = ranks.share((value, _described(error)))
    if error is not None:
        raise error
    if failed is not None:
        name, text = failed
        known = {each.__name__: each for each in errors}
        raise known[name](text) if name in known else errors[0](f"Rank 0 failed: {name}: {text}")
    return value  # type: ignore[no-any-return]


def each_does(ranks: Ranks, work: Callable[[], T], errors: ErrorFamily, *, shared: type[Exception]) -> T:
    """Do `work` on every rank; if one fails, all raise. A collective.

    Args:
        shared: an error that every rank raises in the same way, unless a rank has another error.

    Raises:
        Exception: this rank's own, if it has one that is not `shared`; else the first of `errors`, naming the rank.
    """
    value, error = _try(work)
    everybody = ranks.gather(_described(error))
    if error is not None and not isinstance(error, shared):
        raise error
    failed = {rank: described for rank, described in enumerate(everybody) if described is not None}
    for rank, (name, text) in failed.items():
        if name != shared.__name__:
            raise errors[0](f"Rank {rank} failed, so no rank goes on: {name}: {text}")
    if failed:
        raise shared(failed[min(failed)][1]) from error
    return value  # type: ignore[return-value]


def _try(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _described(error: Exception | None) -> tuple[str, str] | None:
    return None if error is None else (type(error).__name__, str(error))
