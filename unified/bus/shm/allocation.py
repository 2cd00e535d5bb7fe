"""Memory that is written in a slot of the pool, and sent from there: what is made in it need not be copied into it.

It is known by its address, so that whatever shows part of it is found, whoever made the view: numpy, torch or pickle.
As long as one of them lives the slot stays exported, and is granted to as many as it is sent to.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # the codec asks here, and does without ctypes
    from unified.bus.shm.segment import Mapping, Segment
    from unified.bus.shm.slots import Slot

FORWARD_BYTES = 32 * 1024
"""What lies in shared memory already is handed on as it is from this size on; less is copied."""


class InPlaceAllocation(NamedTuple):
    """A slot that was, or is being, written in place."""

    pool: object
    """Whose slot it is."""
    slot: Slot
    address: int
    nbytes: int


_allocations: dict[int, InPlaceAllocation] = {}
"""By address. Finalizers change it, which may run at any time on any thread: so no lock, and no walk through it."""


class _Memory:
    """Behind the views of one such slot. A mixin of ctypes arrays."""

    allocation: InPlaceAllocation
    mapping: Mapping
    _allocations = _allocations

    def __del__(self) -> None:
        allocation: InPlaceAllocation | None = self.__dict__.get("allocation")
        if allocation is not None:
            self._allocations.pop(allocation.address, None)
            allocation.slot.is_pinned = False


def allocate(pool: object, slot: Slot, segment: Segment, nbytes: int) -> memoryview:
    """The first bytes of an exported slot's data, to write to. The last view of them ends the staging."""
    memory: Any = segment.memory(_Memory)
    memory.allocation = allocation = InPlaceAllocation(pool, slot, segment.data_address, nbytes)
    _allocations[allocation.address] = allocation
    return memoryview(memory).cast("B")[:nbytes]


def has_allocations() -> bool:
    """Whether it is worth while to find out where something lies."""
    return bool(_allocations)


def allocation_at(address: int, nbytes: int) -> InPlaceAllocation | None:
    """The slot that was written in place and of which these bytes, which somebody looks at, are part; None: there is
    no such slot, or they are few.
    """
    if nbytes < FORWARD_BYTES:
        return None
    starts = sorted(_allocations)
    index = bisect_right(starts, address) - 1
    allocation = _allocations.get(starts[index]) if index >= 0 else None
    return allocation if allocation is not None and address + nbytes <= allocation.address + allocation.nbytes else None
