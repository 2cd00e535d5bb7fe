"""Arrays allocated in place: in a slot of the pool, from where they are sent without a copy.

The memory is known by its address, so that any view of part of it is found, whoever made the view: numpy, torch or
pickle. As long as a view lives the slot stays pinned, and is granted to as many as it is sent to.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # the codec asks here, and does without ctypes
    from unified.bus.shm.segment import Mapping, Segment
    from unified.bus.shm.slots import Slot

FORWARD_BYTES = 32 * 1024
"""Size from which on what lies in shared memory already is handed on as it is; less is copied."""


class InPlaceAllocation(NamedTuple):
    """Slot that was, or is being, written in place."""

    pool: object
    """The pool that has the slot."""
    slot: Slot
    address: int
    nbytes: int


_allocations: dict[int, InPlaceAllocation] = {}
"""Allocations by address. Finalizers change it, at any time on any thread: so no lock, and no walk through it."""


class _Memory:
    """Memory behind the views of one such slot. A mixin of ctypes arrays."""

    allocation: InPlaceAllocation
    mapping: Mapping
    _allocations = _allocations

    def __del__(self) -> None:
        allocation: InPlaceAllocation | None = self.__dict__.get("allocation")
        if allocation is not None:
            self._allocations.pop(allocation.address, None)
            allocation.slot.is_pinned = False


def allocate(pool: object, slot: Slot, segment: Segment, nbytes: int) -> memoryview:
    """Return the first bytes of a pinned slot's data, to write to. The end of their last view unpins the slot."""
    memory: Any = segment.memory(_Memory)
    memory.allocation = allocation = InPlaceAllocation(pool, slot, segment.data_address, nbytes)
    _allocations[allocation.address] = allocation
    return memoryview(memory).cast("B")[:nbytes]


def has_allocations() -> bool:
    """Return whether it is worth while to find out where something lies."""
    return bool(_allocations)


def allocation_at(address: int, nbytes: int) -> InPlaceAllocation | None:
    """Return the allocation of which these bytes, which somebody looks at, are part; None if none, or they are few."""
    if nbytes < FORWARD_BYTES:
        return None
    starts = sorted(_allocations)
    index = bisect_right(starts, address) - 1
    allocation = _allocations.get(starts[index]) if index >= 0 else None
    return allocation if allocation is not None and address + nbytes <= allocation.address + allocation.nbytes else None
