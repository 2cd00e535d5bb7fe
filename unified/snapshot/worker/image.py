"""Images: a state dict as one block of bytes, with tensors that are copied in and out at the speed of memory.

An image is a header, the tensors, and an index: the table of tensors, and a pickle of all else. In memory only workers
of the job that wrote an image read it; on storage a later job may.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import io
import mmap
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import msgspec
import numpy as np
import torch

from unified.errors import SnapshotError, UsageError
from unified.tensors.copy import Copy, address_of, copy_memory
from unified.tensors.host_buffers import ALIGN, stage
from unified.tensors.walk import identity_of, is_plain, is_sharded, local_part, tensors_in
from unified.values import Value

MAGIC = b"UNISNAP1"
_HEADER = struct.Struct("<8sQQ")
"""Magic, length of the image, start of the index."""
_INERT = {
    *(collections.OrderedDict, collections.Counter, collections.defaultdict),
    *(BuiltinFunctionType, torch.Size, torch.dtype, torch.device, np.ndarray, np.dtype, pickle.PickleBuffer),
}
_FIRST = 64
"""Start of the first tensor."""


class _ImageTensor(Value, frozen=True):
    offset: int
    dtype: str
    shape: list[int]
    is_parameter: bool = False
    requires_grad: bool = False


class _ImageIndex(Value, frozen=True):
    tensors: list[_ImageTensor]
    buffers: list[tuple[int, int]]
    """Offset and size of each buffer that the pickle refers to: numpy's arrays."""
    skeleton: bytes
    has_objects: bool = False
    """True if there are objects that may read the values of tensors while they are unpickled."""


class StateImage:
    """Image of a state: laid out, and not copied yet.

    Args:
        state: nested dicts, lists and tuples. Modules, optimizers and the like at its top are replaced by their state
            dicts.
    """

    def __init__(self, state: Any) -> None:
        self._sources: list[torch.Tensor] = []
        self._entries: list[_ImageTensor] = []
        self._numbers: dict[object, int] = {}
        self._end = _FIRST
        state = _state_of(state)
        arrays: list[pickle.PickleBuffer] = []
        skeleton = io.BytesIO()
        try:
            pickler = _StatePickler(skeleton, self, arrays)
            pickler.dump(state)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(f"the state cannot be pickled: {error}. Remove these values from the state.") from error
        self._arrays = [each.raw() for each in arrays]
        extents = [(self._take(each.nbytes), each.nbytes) for each in self._arrays]
        self._index_start = self._end
        self._index = msgspec.msgpack.encode(
            _ImageIndex(
                tensors=self._entries,
                buffers=extents,
                skeleton=skeleton.getvalue(),
                has_objects=pickler.has_objects,
            )
        )
        self._extents = extents
        self.length = self._index_start + len(self._index)
        """Bytes of the image."""

    def write(self, memory: Any) -> None:
        """Copy the state, as it is now, into a writable buffer of at least `length` bytes. Returns when done."""
        view = memoryview(memory).cast("B")
        targets = [
            _tensor(view, entry) for entry, source in zip(self._entries, self._sources, strict=True) if source.numel()
        ]
        sources = [source.detach() for source in self._sources if source.numel()]
        for event in stage(targets, sources):
            event.synchronize()
        for (offset, nbytes), array in zip(self._extents, self._arrays, strict=True):
            view[offset : offset + nbytes] = array.cast("B") if array.nbytes else b""
        view[self._index_start : self.length] = self._index
        _HEADER.pack_into(view, 0, MAGIC, self.length, self._index_start)

    def place(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor in the table; tied tensors share one."""
        identity = identity_of(tensor)
        number = self._numbers.get(identity)
        if number is None:
            number = self._numbers[identity] = len(self._entries)
            entry = _ImageTensor(
                offset=self._take(tensor.nbytes),
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=list(tensor.shape),
                is_parameter=isinstance(tensor, torch.nn.Parameter),
                requires_grad=tensor.requires_grad,
            )
            self._entries.append(entry)
            self._sources.append(tensor)
        return number

    def _take(self, nbytes: int) -> int:
        start = self._end
        self._end += -(-nbytes // ALIGN) * ALIGN
        return start


class _StatePickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, image: StateImage, arrays: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, protocol=5, buffer_callback=arrays.append)
        self._image = image
        self.has_objects = False

    def reducer_override(self, each: Any) -> Any:
        """Note whether there are objects of types outside `_INERT`, which only keep what they are given."""
        self.has_objects = self.has_objects or not (isinstance(each, type | FunctionType) or type(each) in _INERT)
        return NotImplemented

    def persistent_id(self, each: Any) -> Any:
        """Return the number of a tensor in the table, with its layout if each rank has a piece; None for all else."""
        if not isinstance(each, torch.Tensor):
            return None
        if is_plain(each):
            return self._image.place(each), None
        return _sharded_id(each, self._image) if is_sharded(each) else None


def _sharded_id(each: Any, image: StateImage) -> tuple[int, Any]:
    layout = (tuple(each.placements), tuple(each.shape), tuple(each.stride()), tuple(each.device_mesh.shape))
    return image.place(each.to_local()), layout


class _StateUnpickler(pickle.Unpickler):
    def __init__(self, index: _ImageIndex, content: ImageContent, meshes: Mapping[Any, Any]) -> None:
        arrays = [bytearray(content.memory[offset : offset + nbytes]) for offset, nbytes in index.buffers]
        super().__init__(io.BytesIO(index.skeleton), buffers=arrays)
        self._content = content
        self._meshes = meshes
        self._are_real = index.has_objects
        if self._are_real:
            for number in range(len(index.tensors)):
                content.real(number)
            content.fetch()

    def persistent_load(self, found: Any) -> Any:
        """Return the tensor of a `persistent_id`; without values, unless it is a piece or objects may read them."""
        number, layout = found
        if layout is None:
            return self._content.real(number) if self._are_real else self._content.tensors[number]
        placements, shape, stride, mesh_shape = layout
        mesh = self._meshes.get(mesh_shape)
        if mesh is None:
            raise SnapshotError(
                f"the snapshot has sharded tensors on a device mesh of the shape {mesh_shape}, and the state to be "
                "filled has none on such a mesh: call restore(state) with a state that is sharded like the saved one."
            )
        from torch.distributed.tensor import DTensor

        local = self._content.real(number)
        self._content.fetch()
        return DTensor.from_local(
            local.to(mesh.device_type), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )


class ImageContent:
    """The tensors of an image. Values are copied once, straight to their targets."""

    def __init__(self, memory: memoryview, entries: list[_ImageTensor]) -> None:
        self.memory = memory
        self._entries = entries
        self.tensors = [torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta") for entry in entries]
        """Tensors without values, by number."""
        self.numbers = {id(tensor): number for number, tensor in enumerate(self.tensors)}
        """Numbers of tensors without values, by id."""
        self._real: dict[int, torch.Tensor] = {}
        self._begin = address_of(memory)
        self._wanted: list[Copy] = []
        self._memory: mmap.mmap | None = None

    def number_of(self, tensor: object) -> int | None:
        """Return the number of a tensor without values; None: another tensor."""
        return self.numbers.get(id(tensor))

    def read_into(self, tensor: torch.Tensor, number: int) -> None:
        """Plan to read the values of a tensor into a contiguous one of the same type; `fetch` does it."""
        offset = self._entries[number].offset
        if offset + tensor.nbytes > len(self.memory):
            raise SnapshotError(f"a snapshot cannot be read: it ends at {len(self.memory)}, within a tensor")
        if tensor.nbytes:
            self._wanted.append(Copy(tensor.data_ptr(), self._begin + offset, tensor.nbytes))

    def real(self, number: int) -> torch.Tensor:
        """Return a tensor in memory of its own, whose values come with the next `fetch`."""
        if number not in self._real:
            entry = self._entries[number]
            tensor = _tensor(memoryview(self._own_memory()), entry)
            self.read_into(tensor, number)
            if entry.is_parameter:
                tensor = torch.nn.Parameter(tensor, requires_grad=entry.requires_grad)
            self._real[number] = tensor.requires_grad_(entry.requires_grad) if entry.requires_grad else tensor
        return self._real[number]

    def fetch(self) -> None:
        """Read all planned values, in a few threads."""
        wanted, self._wanted = self._wanted, []
        copy_memory(wanted, torch.get_num_threads())

    def _own_memory(self) -> mmap.mmap:
        """Return memory for all tensors; only pages that are written take up memory."""
        if self._memory is None:
            both = zip(self._entries, self.tensors, strict=True)
            nbytes = max((entry.offset + tensor.nbytes for entry, tensor in both), default=0)
            self._memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        return self._memory


class _RealTensors(dict[int, Any]):
    """Memo of a deep copy that replaces tensors without values by real ones."""

    def __init__(self, content: ImageContent) -> None:
        super().__init__()
        self._content = content
        self._number_of = content.numbers

    def get(self, key: int, default: Any = None) -> Any:
        number = self._number_of.get(key)
        return super().get(key, default) if number is None else self._content.real(number)


def read_state(memory: memoryview, into: Any = None) -> Any:
    """Return the state of an image: a new one, or `into`, filled.

    Args:
        into: state to fill: tensors are filled, objects load their state dicts, all else is replaced.

    Raises:
        SnapshotError: the memory has no image, or `into` has another form.
    """
    try:
        magic, nbytes, start = _HEADER.unpack_from(memory)
        if magic != MAGIC or not _FIRST <= start <= nbytes <= len(memory):
            raise ValueError("its header is not that of a snapshot")
        index = msgspec.msgpack.decode(memory[start:nbytes], type=_ImageIndex)
    except (struct.error, ValueError, msgspec.DecodeError) as error:
        raise SnapshotError(f"a snapshot cannot be read: {error}") from error
    content = ImageContent(memory, index.tensors)
    found = _StateUnpickler(index, content, _meshes_in(into)).load()
    if into is not None:
        return fill(into, found, content)
    state = copy.deepcopy(found, _RealTensors(content))
    content.fetch()
    return state


def fill(state: Any, found: Any, content: ImageContent) -> Any:
    """Fill `state` from a state whose tensors have no values yet. Return `state`, or a new object for a tuple or a
    plain value."""
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    later: list[Callable[[], None]] = []

    def put(target: Any, source: Any, path: str) -> Any:
        if isinstance(target, torch.Tensor):
            _check_same(target, source, path)
            number = content.number_of(source)
            inside = local_part(target).detach()
            if number is not None and inside.dtype == source.dtype and _is_flat(inside):
                content.read_into(inside, number)
            else:
                copies.append((inside, local_part(source if number is None else content.real(number)).detach()))
            return target
        if hasattr(target, "load_state_dict"):
            own = target.state_dict()
            loaded = put(own, source, path) if _have_same_form(own, source) else owned(source)
            if not isinstance(target, torch.nn.Module) or loaded is not own:
                later.append(lambda: target.load_state_dict(loaded))
            return target
        if isinstance(target, dict):
            if not isinstance(source, Mapping):
                raise SnapshotError(f"{path} is a dict, and in the snapshot it is a {type(source).__name__}")
            if missing := [key for key in target if key not in source]:
                raise SnapshotError(f"the snapshot has no {path}[{missing[0]!r}]; there are {sorted(map(str, source))}")
            for key in target:
                target[key] = put(target[key], source[key], f"{path}[{key!r}]")
            if target is not state or not target:  # else the caller wants these keys only
                target.update({key: owned(value) for key, value in source.items() if key not in target})
            return target
        if isinstance(target, list) and isinstance(source, list) and len(target) == len(source):
            target[:] = [
                put(*pair, f"{path}[{number}]") for number, pair in enumerate(zip(target, source, strict=True))
            ]
            return target
        if type(target) is tuple and isinstance(source, tuple) and len(target) == len(source):
            return tuple(
                put(*pair, f"{path}[{number}]") for number, pair in enumerate(zip(target, source, strict=True))
            )
        return owned(source)

    def owned(value: Any) -> Any:
        return copy.deepcopy(value, _RealTensors(content))

    filled = put(state, found, "state")
    content.fetch()
    with torch.no_grad():
        for inside, source in copies:
            inside.copy_(source)
    for each in later:
        each()
    return filled


def _have_same_form(one: Any, other: Any) -> bool:
    """Return True if two states differ only in values."""
    if isinstance(one, Mapping):
        return (
            isinstance(other, Mapping)
            and one.keys() == other.keys()
            and all(_have_same_form(value, other[key]) for key, value in one.items())
        )
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(_have_same_form, one, other))
    return isinstance(one, torch.Tensor) == isinstance(other, torch.Tensor)


def _is_flat(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and is_plain(tensor)


def _check_same(target: torch.Tensor, source: Any, path: str) -> None:
    if not isinstance(source, torch.Tensor):
        raise SnapshotError(f"{path} is a tensor, and in the snapshot it is a {type(source).__name__}")
    here, there = local_part(target).shape, local_part(source).shape
    if here != there:
        raise SnapshotError(f"{path} has the shape {list(here)}, and in the snapshot {list(there)}")


def _state_of(state: Any) -> Any:
    """Return a state with the objects at its top replaced by their state dicts."""
    if isinstance(state, Mapping):
        return {key: _own_state(value) for key, value in state.items()}
    return _own_state(state)


def _own_state(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") and hasattr(value, "load_state_dict") else value


def _meshes_in(state: Any) -> dict[tuple[int, ...], Any]:
    """Return the device meshes of a state's sharded tensors, by shape."""
    if state is None:
        return {}
    found = {}
    for each in _all_tensors(state):
        if is_sharded(each):
            found[tuple(each.device_mesh.shape)] = each.device_mesh
    return found


def _all_tensors(state: Any) -> Iterator[Any]:
    yield from tensors_in(state, in_modules=True)
    for each in state.values() if isinstance(state, Mapping) else [state]:
        if isinstance(each, torch.optim.Optimizer):
            for group in each.param_groups:
                yield from group["params"]


def _tensor(view: memoryview, entry: _ImageTensor) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype)
    count = 1
    for size in entry.shape:
        count *= size
    if not count:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(view, dtype=dtype, count=count, offset=entry.offset).view(entry.shape)
