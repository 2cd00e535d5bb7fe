"""Pickles of all other Python objects: protocol 5, large buffers out of band, tensors by their bytes at any depth.

cloudpickle takes the objects that pickle cannot (a lambda, a local class). `unified.job.by_value` pickles objects that
a script defines. Only workers of one job, and its driver, load these pickles.
"""

from __future__ import annotations

import contextlib
import functools
import io
import opcode
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from unified.bus.codec.numpy_arrays import array_bytes, build_array, give_away, is_raw
from unified.bus.codec.tensors import OUT_OF_BAND_BYTES, Outgoing, build_tensor, is_dense
from unified.errors import UsageError
from unified.job.by_value import cloud_pickler, has_readers_elsewhere, names_main, reduced

BUFFER, TENSOR_MEMORY, DEVICE_TENSOR = range(3)
"""Kinds of out-of-band buffers in a pickle."""
_are_refused = False


def dump_object(value: object, outgoing: Outgoing) -> tuple[bytes, list[int], bytes]:
    """Return a pickle, the numbers of its out-of-band buffers in the order in which it reads them, and the kind of
    each. UsageError: the object, or a part of it, cannot be pickled."""
    before = len(outgoing.buffers)
    try:
        # the plain pickler is twice as fast; the other one is needed only where an array can be inside
        if "torch" in sys.modules or "numpy" in sys.modules:
            return _dump(value, outgoing, _ArrayPickler)
        pickled = _dump(value, outgoing, None)
        if not names_main(pickled[0]):
            return pickled
        outgoing.reset(before)
        return _dump(value, outgoing, _ArrayPickler)
    except Exception:  # __reduce__ is the user's code, and may raise anything
        outgoing.reset(before)
    try:
        return _dump(value, outgoing, _cloud_pickler())
    except Exception as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UsageError(
            f"a value of type {kind} cannot be sent: {type(error).__name__}: {error}. "
            "Send plain data, or make it picklable (no open files, locks or generators)."
        ) from error


def _dump(value: object, outgoing: Outgoing, kind: type[Any] | None) -> tuple[bytes, list[int], bytes]:
    """Pickle `value` with a pickler of class `kind`; None: with that of the standard library."""
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

    out = io.BytesIO()
    pickler = (kind or pickle.Pickler)(out, protocol=5, buffer_callback=keep_inside)
    if isinstance(pickler, ArrayReducer):
        pickler.be_for(outgoing, placed)
    pickler.dump(value)
    return out.getvalue(), numbers, bytes(kinds)


@contextlib.contextmanager
def without_pickles() -> Iterator[None]:
    """Have this process read no pickle meanwhile: a pickle can run any code of its author."""
    global _are_refused
    before, _are_refused = _are_refused, True
    try:
        yield
    finally:
        _are_refused = before


def are_refused() -> bool:
    """Return True while this process is to read no pickles."""
    return _are_refused


def raise_if_signal(error: BaseException) -> None:
    """Raise an error of reading a pickle again if the handler of a signal raised it, such as that of Ctrl-C."""
    if isinstance(error, Exception) or threading.current_thread() is not threading.main_thread():
        return
    handlers = [signal.getsignal(each) for each in signal.valid_signals()]
    codes = [getattr(getattr(each, "func", each), "__code__", None) for each in handlers]
    instruction, trace = -1, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            raise error
        instruction, trace = trace.tb_frame.f_code.co_code[trace.tb_lasti], trace.tb_next
    is_ctrl_c = type(error) is KeyboardInterrupt and signal.default_int_handler in handlers
    if is_ctrl_c and instruction != opcode.opmap["RAISE_VARARGS"]:  # Python's own handler leaves no frame
        raise error


def as_it_is(value: Any) -> Any:
    """Return `value`. A pickle calls this to get an object that was built before."""
    return value


class ArrayReducer:
    """Reducer of picklers for tensors and arrays. torch would write a tensor's storage through a second pickle, with
    two copies. numpy would copy a non-contiguous array into the pickle, in native byte order.
    """

    _outgoing: Outgoing
    _placed: dict[int, tuple[int, int]]
    _views: list[memoryview]

    def be_for(self, outgoing: Outgoing, placed: dict[int, tuple[int, int]]) -> None:
        """Collect large buffers in `outgoing`, and note in `placed` the frame of each stand-in."""
        self._outgoing = outgoing
        self._placed = placed
        self._views = []
        """Stand-ins, kept alive: `placed` has their ids."""

    def reduce_array(self, value: Any) -> Any:
        """Return the reduce value of a tensor, an array, or what a script defines; NotImplemented for all else."""
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if torch is not None and type(value) is torch.Tensor:
            return self._tensor(torch, value) if is_dense(torch, value) else NotImplemented
        if numpy is None or type(value) is not numpy.ndarray or not is_raw(value.dtype):
            return reduced(value, with_code=has_readers_elsewhere())
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
        view = memoryview(bytearray(1))  # writable, or pickle would ask for a read-only buffer
        self._views.append(view)
        self._placed[id(view)] = (number, kind)
        return pickle.PickleBuffer(view)


class _ArrayPickler(ArrayReducer, pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return self.reduce_array(value)


@functools.cache
def _cloud_pickler() -> type[Any]:
    base = cloud_pickler()

    class CloudArrayPickler(ArrayReducer, base):  # type: ignore[misc, valid-type]  # found when it is needed
        def reducer_override(self, value: Any) -> Any:
            found = self.reduce_array(value)
            return super().reducer_override(value) if found is NotImplemented else found

    return CloudArrayPickler


def _with_grad(tensor: Any, requires_grad: bool) -> Any:
    return tensor.requires_grad_(requires_grad)
