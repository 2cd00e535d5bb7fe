"""Any other Python object: pickle protocol 5, its large buffers out of band, tensors by their bytes wherever they hide.

Only workers of one job ever load what is dumped here.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

from unified.bus.arrays import array_bytes, build_array, give_away, is_raw
from unified.bus.outgoing import OUT_OF_BAND_BYTES, Outgoing
from unified.bus.tensors import Buffer, build_tensor, is_dense
from unified.errors import ProtocolError, UsageError

BUFFER, TENSOR_MEMORY, DEVICE_TENSOR = range(3)
"""What a pickle wants for one of its out-of-band buffers."""


def dump_object(value: object, outgoing: Outgoing) -> tuple[bytes, list[int], bytes]:
    """A pickle; the numbers of the buffers that it left out, in the order in which it wants them; and what it wants of
    each.

    Raises:
        UsageError: the object, or something in it, cannot be pickled.
    """
    numbers: list[int] = []
    kinds = bytearray()
    placed: dict[int, tuple[int, int]] = {}

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        number, kind = placed.get(id(view.obj), (-1, BUFFER))
        if number < 0:
            if view.nbytes < OUT_OF_BAND_BYTES:
                return True
            number = outgoing.add(view)
        numbers.append(number)
        kinds.append(kind)
        return False

    try:
        out = io.BytesIO()
        # the plain pickler is twice as fast; the other one is needed only where an array can be inside
        if "torch" in sys.modules or "numpy" in sys.modules:
            _ArrayPickler(out, keep_inside, outgoing, placed).dump(value)
        else:
            pickle.Pickler(out, protocol=5, buffer_callback=keep_inside).dump(value)
    except Exception as error:  # __reduce__ is the user's code and raises what it likes
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UsageError(
            f"a value of type {kind} cannot be sent: {type(error).__name__}: {error}. "
            "Send plain data, or make it picklable (no lambdas, open files, locks or generators)."
        ) from error
    return out.getvalue(), numbers, bytes(kinds)


def load_object(
    data: Buffer,
    numbers: Sequence[int],
    kinds: bytes,
    find: Callable[[int], Buffer],
    memory: Callable[[int], Buffer],
    device_tensor: Callable[[int], Any],
) -> Any:
    """The object. Arrays over its buffers are read-only.

    Args:
        data: the pickle.
        numbers, kinds: as `dump_object` gave them.
        find: a buffer by its number.
        memory: the same for a tensor to write to.
        device_tensor: a tensor that has two buffers, by the number of the first.
    """
    if len(numbers) != len(kinds):
        raise ProtocolError(f"a pickle wants {len(numbers)} buffers of {len(kinds)} kinds.")
    wanted: list[Any] = []
    for number, kind in zip(numbers, kinds, strict=True):
        if kind == DEVICE_TENSOR:
            wanted.append(device_tensor(number))
        elif kind == TENSOR_MEMORY:
            wanted.append(memory(number))
        else:
            wanted.append(memoryview(find(number)).toreadonly())
    return pickle.loads(data, buffers=wanted)


def as_it_is(value: Any) -> Any:
    """What a pickle calls to get an object that was built before it was loaded."""
    return value


class _ArrayPickler(pickle.Pickler):
    """torch would write a tensor's storage through a second pickle, with two copies. numpy would copy an array that is
    not contiguous into the pickle, and make it of native bytes.
    """

    def __init__(
        self,
        out: io.BytesIO,
        keep_inside: Callable[[pickle.PickleBuffer], bool],
        outgoing: Outgoing,
        placed: dict[int, tuple[int, int]],
    ) -> None:
        super().__init__(out, protocol=5, buffer_callback=keep_inside)
        self._outgoing = outgoing
        self._placed = placed
        self._views: list[memoryview] = []
        """Keeps what `placed` names alive: an id is good only as long."""

    def reducer_override(self, value: Any) -> Any:
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if torch is not None and type(value) is torch.Tensor:
            return self._tensor(torch, value) if is_dense(torch, value) else NotImplemented
        if numpy is None or type(value) is not numpy.ndarray or not is_raw(value.dtype):
            return NotImplemented
        if value.dtype.isnative and (value.flags.c_contiguous or value.flags.f_contiguous):
            give_away(value)
            return NotImplemented
        data, dtype, shape, fortran = array_bytes(numpy, value)
        return build_array, (pickle.PickleBuffer(data), dtype, shape, fortran)

    def _tensor(self, torch: Any, value: Any) -> Any:
        if self._outgoing.stays_on_device(value):
            stand_in = self._stand_in(self._outgoing.device_tensor(value), DEVICE_TENSOR)
            return (_with_grad, (stand_in, True)) if value.requires_grad else (as_it_is, (stand_in,))
        memory, shape, dtype = self._outgoing.tensor(torch, value)
        buffer = self._stand_in(memory, TENSOR_MEMORY) if isinstance(memory, int) else bytearray(memory)
        return build_tensor, (buffer, shape, dtype, value.requires_grad)

    def _stand_in(self, number: int, kind: int) -> pickle.PickleBuffer:
        """In the pickle, a place for what frame `number` becomes."""
        view = memoryview(bytearray(1))  # to be written to, or pickle would want it read-only
        self._views.append(view)
        self._placed[id(view)] = (number, kind)
        return pickle.PickleBuffer(view)


def _with_grad(tensor: Any, requires_grad: bool) -> Any:
    return tensor.requires_grad_(requires_grad)
