"""Ranks that do something together, and how they agree: small objects over torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from unified.errors import UsageError

T = TypeVar("T")
Said = tuple[str, str]
"""An error as it is told to other ranks: the name of its class, and its text."""


class Ranks(Protocol):
    """Ranks that act together.

    Attributes:
        rank: of this process among them.
        size: how many they are.
    """

    rank: int
    size: int

    def share(self, value: Any) -> Any:
        """Return on every rank what rank 0 gave. A collective."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Return what each rank gave, by rank. A collective."""
        ...


class Alone:
    """One rank that needs nobody."""

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


def lead(ranks: Ranks, work: Callable[[], T], error_of: Callable[[str, str], Exception]) -> T:
    """Rank 0 does `work`; every rank returns what it returned, or raises what it raised. A collective.

    Args:
        error_of: what the other ranks raise, of the name of the error's class and its text.
    """
    value, error = tried(work) if ranks.rank == 0 else (None, None)
    value, failed = ranks.share((value, said(error)))
    if error is not None:
        raise error
    if failed is not None:
        raise error_of(*failed)
    return value  # type: ignore[no-any-return]


def tried(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return what `work` returned, or raised."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def said(error: Exception | None) -> Said | None:
    """An error, for other ranks."""
    return None if error is None else (type(error).__name__, str(error))
