"""Whatever goes in comes out equal and of the same type; whatever is corrupt is an error and nothing else."""

import dataclasses
import datetime
import functools
import subprocess
import sys
import threading
import warnings
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from unified.bus.codec.codec import OUT_OF_BAND_BYTES, SerializedValue, decode, deserialize, encode
from unified.errors import ProtocolError, UsageError

Ext = msgspec.msgpack.Ext
pack = msgspec.msgpack.encode


@dataclasses.dataclass
class Box:
    content: Any
    label: str = ""


def over_the_wire(value: Any) -> Any:
    encoded = encode(value)
    # as they arrive: memory of our own that can be written to
    return decode(encoded.body, [memoryview(bytearray(buffer)) for buffer in encoded.buffers])


@pytest.mark.parametrize(
    "value",
    [2**63, 2**64 + 1, -(2**63) - 1, -(2**200), "\ud800", bytearray(b"ab"), range(5), slice(1, 2), {1: {2: ()}}, ...],
    ids=repr,
)
def test_odd_values(value: object) -> None:
    back = over_the_wire(value)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_large_bytes_travel_beside_the_body(kind: type) -> None:
    value = {"deep": [(kind(b"x" * OUT_OF_BAND_BYTES),)]}
    encoded = encode(value)
    assert len(encoded.body) < 100
    assert [len(buffer) for buffer in encoded.buffers] == [OUT_OF_BAND_BYTES]
    back = over_the_wire(value)
    assert back == value
    assert type(back["deep"][0][0]) is kind


def test_large_array_is_not_copied_and_arrives_read_only() -> None:
    array = np.arange(100_000)
    assert np.shares_memory(np.frombuffer(encode(Box(array)).buffers[0], np.uint8), array)
    plain = encode(array)
    frame = bytearray(plain.buffers[0])
    back = decode(plain.body, [frame])
    assert np.shares_memory(back, np.frombuffer(frame, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        back[0] = 1


DTYPES = ["f4", ">i8", "?", "c16", "u1", "f2", "g", "M8[ns]", "S3", "U4", "O", [("a", "f4"), ("b", ">i2", (2,))]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4), (200, 300)], ids=str)
def test_arrays_of_every_kind(dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, dtype)
    views = [array, array.T, np.asfortranarray(array), *([array[::2]] if shape else [])]
    for view in views:
        back = over_the_wire(view)
        assert (back.dtype, back.shape) == (view.dtype, view.shape)
        assert (back == view).all()


TORCH_DTYPES = ["float32", "bfloat16", "float16", "bool", "int64", "uint8", "complex64", "float8_e4m3fn"]


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (200, 300)], ids=str)
@pytest.mark.parametrize("wrap", [lambda it: it, Box, lambda it: {"state": (it,)}], ids=["bare", "object", "nested"])
def test_tensors_of_every_kind(dtype: str, shape: tuple[int, ...], wrap: Any) -> None:
    tensor = torch.ones(shape).to(getattr(torch, dtype))
    for view in (tensor, tensor.T if tensor.dim() == 2 else tensor, tensor[:1] if shape else tensor):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns of read-only memory
            back = over_the_wire(wrap(view))
        back = back.content if isinstance(back, Box) else back["state"][0] if isinstance(back, dict) else back
        assert (back.dtype, back.shape) == (view.dtype, view.shape)
        assert torch.equal(back.to(torch.complex64), view.to(torch.complex64))


def test_tensor_memory_is_not_copied() -> None:
    tensor = torch.zeros(100_000)
    encoded = encode({"weights": tensor})
    assert np.frombuffer(encoded.buffers[0], np.uint8).ctypes.data == tensor.data_ptr()
    del tensor
    assert bytes(encoded.buffers[0]) == bytes(400_000)  # the view keeps the memory


def test_value_that_contains_itself() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    back = over_the_wire(loop)
    assert back[1] is back


def test_deep_value() -> None:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    assert over_the_wire(deep) == deep


@pytest.mark.parametrize(
    "value",
    [threading.Lock(), (each for each in [1]), Box(threading.Lock()), functools.partial(print, threading.Lock())],
    ids=["lock", "generator", "inside", "partial"],
)
def test_what_cannot_be_pickled_says_so(value: object) -> None:
    with pytest.raises(UsageError, match=r"cannot be sent: .*Send plain data"):
        encode([1, value])


def test_what_only_cloudpickle_can_say() -> None:
    class Local:
        """Of this function."""

        def __init__(self, array: Any) -> None:
            self.array = array

    large = np.arange(OUT_OF_BAND_BYTES)
    scale = 3
    value = [lambda x: x * scale, Local, Local(large), {"step": functools.partial(lambda a, b: a - b, 5)}]
    encoded = encode(value)
    sizes = [memoryview(buffer).nbytes for buffer in encoded.buffers]
    assert large.nbytes in sizes, "the array was copied into the pickle"
    function, local, instance, more = deserialize(encoded)
    assert function(2) == 6
    assert local.__doc__ == "Of this function."
    np.testing.assert_array_equal(instance.array, large)
    assert more["step"](2) == 3


def test_an_attempt_that_failed_leaves_no_buffers() -> None:
    encoded = encode(Box([np.arange(OUT_OF_BAND_BYTES), torch.ones(OUT_OF_BAND_BYTES), lambda: 1]))
    assert len(encoded.buffers) == 2
    array, tensor, function = deserialize(encoded).content
    assert (int(array[-1]), float(tensor[-1]), function()) == (OUT_OF_BAND_BYTES - 1, 1.0, 1)


def reference(code: int, content: object) -> bytes:
    return pack(Ext(code, pack(content)))


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",  # a list of four thousand million
        b"\xc9\xff\xff\xff\xff\x01",  # an extension longer than the frame
        reference(4, [3, 1]),  # buffer 3 of none
        reference(4, [-1, 1]),
        reference(4, [b"ab", 3]),
        reference(7, ["<f8", [1 << 40], False, b""]),  # a shape that its bytes do not hold
        reference(7, ["<f8", [-1], False, b"12345678"]),
        reference(7, ["|O", [1], False, b"12345678"]),
        reference(8, ["float32", [2], False, b"1234"]),
        reference(8, ["nn", [], False, b""]),
        reference(8, ["qint8", [4], False, b"1234"]),
        reference(7, ["<f8", [1] * 65, False, b"12345678"]),
        reference(7, ["V0", [], False, b""]),
        reference(8, ["float32", [1 << 62] * 60, False, b""]),
        reference(9, [b"", [0], b"\0"]),
        reference(9, [b"", [0], b""]),
        reference(9, [b"", 5, b""]),
        reference(12, ["<f8", b"1234"]),
        reference(13, [b"", 0, 1]),
        reference(13, [b"", -1, 0]),
        reference(14, 0),
        reference(15, [0, False]),
        reference(99, None),
        pack(Ext(1, pack(5))),  # a tuple of no list
        pack(Ext(-1, b"123")),  # a time stamp of three bytes
    ],
    ids=repr,
)
def test_hostile_body_is_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(body)


def test_object_of_a_class_that_is_not_here_is_a_protocol_error() -> None:
    encoded = encode(datetime.date(2026, 1, 1))
    with pytest.raises(ProtocolError, match="dateXime"):
        decode(encoded.body.replace(b"datetime", b"dateXime"))


def test_codec_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from unified.bus.codec.codec import decode, encode\n"
        "assert decode(encode([(1, {2}), range(3)]).body) == [(1, {2}), range(3)]\n"
        "sys.exit(', '.join({'torch', 'numpy', 'ctypes'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_size_counts_body_and_buffers() -> None:
    assert SerializedValue(b"123", [memoryview(bytearray(10)), b"12"]).nbytes == 15
