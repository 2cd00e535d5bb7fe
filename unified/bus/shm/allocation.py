"""Arrays allocated in place: in a slot of the pool, from which they are sent without a copy.

The memory is found by its address, from any view of a part of it, whether numpy, torch or pickle made the view. As long
as a view exists, the slot stays pinned, and is granted to every reader that it is sent to.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # the codec uses this module, and must not load ctypes
    from unified.bus.shm.segment import Mapping, Segment
    from unified.bus.shm.slots import Slot

FORWARD_BYTES = 32 * 1024
"""Size from which data in shared memory is handed on as it is; less is copied."""


class InPlaceAllocation(NamedTuple):
    """Slot that was, or is being, written in place."""

    pool: object
    slot: Slot
    address: int
    nbytes: int


_allocations: dict[int, InPlaceAllocation] = {}
"""Allocations by address. Finalizers change it at any time, on any thread: so no lock, and no loop over it."""


class _Memory:
    """Memory behind the views of one allocation. A mixin of ctypes arrays."""

    allocation: InPlaceAllocation
    mapping: Mapping
    _allocations = _allocations

    def __del__(self) -> None:
        allocation: InPlaceAllocation | None = self.__dict__.get("allocation")
        if allocation is not None:
            self._allocations.pop(allocation.address, None)
            allocation.slot.is_pinned = False


def allocate(pool: object, slot: Slot, segment: Segment, nbytes: int) -> memoryview:
    """Return the first `nbytes` of a pinned slot's data, to write to. The end of the last view unpins the slot."""
    memory: Any = segment.memory(_Memory)
    memory.allocation = allocation = InPlaceAllocation(pool, slot, segment.data_address, nbytes)
    _allocations[allocation.address] = allocation
    return memoryview(memory).cast("B")[:nbytes]


def has_allocations() -> bool:
    """Return whether there are allocations, so that a look-up makes sense."""
    return bool(_allocations)


def allocation_at(address: int, nbytes: int) -> InPlaceAllocation | None:
    """Return the allocation that contains these bytes (a view must exist); None: there is none, or they are few."""
    if nbytes < FORWARD_BYTES:
        return None
    starts = sorted(_allocations)
    index = bisect_right(starts, address) - 1
    allocation = _allocations.get(starts[index]) if index >= 0 else None
    return allocation if allocation is not None and address + nbytes <= allocation.address + allocation.nbytes else None
