"""Memory that is written in a slot of the pool, and sent from there: what is made in it need not be copied into it.

It is known by its address, so that whatever shows part of it is found, whoever made the view: numpy, torch or pickle.
As long as one of them lives the slot stays staged, and is granted to as many as it is sent to.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # the codec asks here, and does without ctypes
    from unified.bus.shm.segment import Mapping, Segment
    from unified.bus.shm.slots import Slot

FORWARD_BYTES = 32 * 1024
"""What lies in shared memory already is handed on as it is from this size on; less is copied."""


class Born(NamedTuple):
    """A slot that was, or is being, written in place."""

    pool: object
    """Whose slot it is."""
    slot: Slot
    address: int
    nbytes: int


_living: dict[int, Born] = {}
"""By address. Finalizers change it, which may run at any time on any thread: so no lock, and no walk through it."""


class _Memory:
    """Behind the views of one such slot. A mixin of ctypes arrays."""

    born: Born
    mapping: Mapping
    _living = _living

    def __del__(self) -> None:
        born: Born | None = self.__dict__.get("born")
        if born is not None:
            self._living.pop(born.address, None)
            born.slot.is_staged = False


def bear(pool: object, slot: Slot, segment: Segment, nbytes: int) -> memoryview:
    """The first bytes of a staged slot's data, to write to. The last view of them ends the staging."""
    memory: Any = segment.memory(_Memory)
    memory.born = born = Born(pool, slot, segment.data_address, nbytes)
    _living[born.address] = born
    return memoryview(memory).cast("B")[:nbytes]


def is_any_living() -> bool:
    """Whether it is worth while to find out where something lies."""
    return bool(_living)


def born_at(address: int, nbytes: int) -> Born | None:
    """The slot that was written in place and of which these bytes, which somebody looks at, are part; None: there is
    no such slot, or they are few.
    """
    if nbytes < FORWARD_BYTES:
        return None
    starts = sorted(_living)
    index = bisect_right(starts, address) - 1
    born = _living.get(starts[index]) if index >= 0 else None
    return born if born is not None and address + nbytes <= born.address + born.nbytes else None
