"""Whatever MessagePack or pickle can carry comes back equal; what is broken is refused, at no more cost than it is."""

import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import gc
import pathlib
import tracemalloc
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from unified.bus.codec import cuda
from unified.bus.codec.codec import (
    LARGE_BODY_BYTES,
    OUT_OF_BAND_BYTES,
    SerializedValue,
    decode,
    deserialize,
    encode,
)
from unified.bus.codec.encoder import (
    ARRAY,
    BODY,
    BYTEARRAY,
    BYTES,
    DEVICE,
    INT,
    OBJECT,
    SERIALIZED,
    TENSOR,
    TEXT,
    ValueEncoder,
)
from unified.errors import ProtocolError

Ext = msgspec.msgpack.Ext
pack = msgspec.msgpack.encode
FIXED_COST = 256 * 1024
"""Error messages and decoders."""
COST_OF_A_BYTE = 200
"""Of the body: a byte of MessagePack can be an empty dict. Of a buffer: 1, for a copy."""
SIZE = 100_000
"""Of a buffer, where it must show."""


@pytest.fixture(autouse=True, scope="module")
def whatever_decoding_imports() -> None:
    """It is no frame's cost, and takes longer than one example may."""
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401


@dataclasses.dataclass
class Record:
    content: Any


class Point(NamedTuple):
    x: int
    y: int


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


def over_the_wire(value: Any) -> Any:
    encoded = encode(value)
    return decode(encoded.body, [memoryview(bytearray(buffer)) for buffer in encoded.buffers])


def same(one: Any, other: Any) -> bool:
    """Equal, of the same types all the way down, NaN being NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, float | complex):
        return repr(one) == repr(other)
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return all(map(same, one, other)) and len(one) == len(other) and all(map(same, one.values(), other.values()))
    if isinstance(one, Record):
        return same(one.content, other.content)
    if isinstance(one, SerializedValue):
        return same(deserialize(one), deserialize(other))
    return bool(one == other)


texts = st.text(st.characters(codec=None, categories=None), max_size=20)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**64) - 2, 2**65)
    | st.floats()
    | st.complex_numbers()
    | texts
    | st.binary(max_size=40)
    | st.dates()
    | st.datetimes()
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.uuids()
    | st.sampled_from([datetime.UTC, pathlib.PurePosixPath("/a/b"), int, len, ..., NotImplemented, Record])
    | st.sampled_from([Color.RED, Level.LOW])
    | st.builds(Point, st.integers(), st.integers())
)
numpy_scalars = hnp.scalar_dtypes().flatmap(lambda dtype: hnp.arrays(dtype, ()).map(lambda array: array[()]))
hashables = st.recursive(
    st.none() | st.booleans() | st.integers() | texts | st.binary(max_size=10) | st.uuids(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
large = st.integers(OUT_OF_BAND_BYTES - 2, OUT_OF_BAND_BYTES + 2).flatmap(
    lambda size: st.sampled_from([bytes, bytearray]).map(lambda kind: kind(b"\x5a" * size))
)
dtypes = (
    hnp.scalar_dtypes()
    | hnp.complex_number_dtypes(endianness=">")
    | hnp.integer_dtypes(endianness=">")
    | hnp.byte_string_dtypes(min_len=1)
    | hnp.unicode_string_dtypes(min_len=1)
    | hnp.array_dtypes(hnp.integer_dtypes() | hnp.datetime64_dtypes(), allow_subarrays=True)
)
arrays = dtypes.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)
values = st.recursive(
    scalars | numpy_scalars | arrays | large,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(hashables, max_size=4)
        | st.frozensets(hashables, max_size=4)
        | st.dictionaries(hashables, inner, max_size=4)
        | st.builds(Record, inner)
        | inner.map(lambda item: collections.OrderedDict(a=item))
        | inner.map(lambda item: collections.deque([item], maxlen=3))
        | inner.map(encode)
    ),
    max_leaves=12,
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner),
    max_leaves=20,
)


@settings(max_examples=150)
@given(values)
def test_whatever_can_be_carried_comes_back(value: Any) -> None:
    assert same(over_the_wire(value), value)


@given(plain)
def test_plain_values_are_plain_messagepack(value: Any) -> None:
    encoded = encode(value)
    assert encoded.buffers == []
    assert same(msgspec.msgpack.decode(encoded.body), value)
    assert same(decode(encoded.body), value)


@given(arrays, st.data())
def test_arrays_however_they_lie(array: np.ndarray, data: st.DataObject) -> None:
    view = array
    for axis in range(array.ndim):
        step = data.draw(st.sampled_from([1, 2, -1]))
        view = view[(slice(None),) * axis + (slice(None, None, step),)]
    view = view.transpose(data.draw(st.permutations(range(array.ndim))))
    back = over_the_wire([view, Record(view)])
    assert same(back[0], view)
    assert same(back[1].content, view)


@given(st.lists(values, max_size=3))
def test_a_sealed_value_opens_to_what_was_sealed(items: list[Any]) -> None:
    sealed = encode(items)
    assert same(deserialize(sealed), items)
    assert same(deserialize(sealed.detach()), items)
    carried = over_the_wire({"deep": (sealed, Record(sealed))})["deep"]
    for arrived in (carried[0], carried[1].content):
        assert type(arrived) is SerializedValue
        assert arrived.nbytes == sealed.nbytes
        assert same(deserialize(arrived), items)
        assert same(deserialize(arrived), items), "it can be decoded again"


def test_a_large_body_becomes_a_buffer() -> None:
    for value in (list(range(LARGE_BODY_BYTES)), "ä" * LARGE_BODY_BYTES, {(1, 2): "x" * LARGE_BODY_BYTES}):
        encoded = encode(value)
        assert len(encoded.body) < 20
        assert len(encoded.buffers) == 1
        assert over_the_wire(value) == value
        assert deserialize(deserialize(encode(over_the_wire([encode(value)])[0]))) == value


def test_a_sealed_value_is_small_when_its_value_is() -> None:
    assert encode(None).nbytes == 1
    assert len(encode(encode([1, 2, 3])).body) < 20
    assert repr(encode(1)) == "<SerializedValue: 1 bytes>"


def test_what_is_sealed_here_may_be_detached_from_the_callers_memory() -> None:
    array = np.zeros(OUT_OF_BAND_BYTES, "u1")
    sealed, detached = encode(array), encode(array).detach()
    array += 1
    assert (deserialize(sealed)[0], deserialize(detached)[0]) == (1, 0)
    assert not deserialize(sealed).flags.writeable


# Broken frames


def refusal_of(action: Callable[[], Any]) -> Exception | None:
    try:
        action()
    except Exception as error:  # any other than the one below would end the thread that receives
        return error
    return None


def check_cost(body: bytes, buffers: list[bytes]) -> None:
    """A value or a ProtocolError, and no memory beyond what the frames are worth."""
    limit = FIXED_COST + COST_OF_A_BYTE * len(body) + sum(map(len, buffers))
    # Tracing sees all threads, and earlier tests may have left some in this process: a cost is what shows every time.
    assert any(cost_of(body, buffers) <= limit for _ in range(3))


def cost_of(body: bytes, buffers: list[bytes]) -> int:
    """The peak of memory, in bytes, while frames are decoded."""
    gc.disable()  # what earlier tests left, such as an error that nobody read, may log much when it is collected
    tracemalloc.start()
    try:
        refusal = refusal_of(lambda: decode(body, buffers))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.enable()
    assert refusal is None or isinstance(refusal, ProtocolError)
    return peak


messages = st.recursive(
    plain | arrays.filter(lambda array: array.dtype.names is None and not array.dtype.hasobject) | large,
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | inner.map(encode),
    max_leaves=6,
)


@given(st.binary(max_size=200), st.lists(st.binary(max_size=20), max_size=2))
def test_rubbish_is_refused_or_some_value(body: bytes, buffers: list[bytes]) -> None:
    refusal = refusal_of(lambda: decode(body, buffers))
    assert refusal is None or isinstance(refusal, ProtocolError)


@given(values, st.data())
def test_truncated_bodies_of_any_value_are_refused(value: Any, data: st.DataObject) -> None:
    body = encode([value]).body
    with pytest.raises(ProtocolError):
        decode(body[: data.draw(st.integers(0, len(body) - 1))])


@given(messages, st.data())
def test_truncated_bodies_are_refused(value: Any, data: st.DataObject) -> None:
    encoded = encode((value, 1))
    cut = data.draw(st.integers(0, len(encoded.body) - 1))
    buffers = [bytes(buffer) for buffer in encoded.buffers]
    with pytest.raises(ProtocolError):
        decode(encoded.body[:cut], buffers)
    check_cost(encoded.body[:cut], buffers)


@given(messages, st.data())
def test_flipped_bits_are_refused_or_another_value(value: Any, data: st.DataObject) -> None:
    encoded = encode((value, 1))
    body = bytearray(encoded.body)
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    if bytes([OBJECT]) not in body:  # a pickle may do whatever it likes
        check_cost(bytes(body), [bytes(buffer) for buffer in encoded.buffers])


@given(values, st.data())
def test_pickles_that_are_cut_are_refused(value: Any, data: st.DataObject) -> None:
    """What a pickle may do is not bounded (it is a program, and only peers of the job can send one): but part of one is
    an error like any other."""
    writer = ValueEncoder()
    content = writer.pickled(value).data
    where, numbers, kinds = msgspec.msgpack.decode(content)
    buffers = [bytes(buffer) for buffer in writer.outgoing.buffers]
    whole = where if isinstance(where, bytes) else buffers[where]
    assert same(decode(pack(Ext(OBJECT, content)), buffers), value)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(ProtocolError):
        decode(pack(Ext(OBJECT, pack([cut, numbers, kinds]))), buffers)


@given(st.sampled_from([np.arange(9000), b"x" * 20_000, bytearray(20_000), Record(np.arange(9000))]), st.data())
def test_buffers_that_are_missing_or_cut_are_refused(value: Any, data: st.DataObject) -> None:
    encoded = encode([value])
    buffers = [bytes(buffer) for buffer in encoded.buffers]
    cut = data.draw(st.integers(0, len(buffers[0]) - 1))
    for broken in ([], [buffers[0][:cut]]):
        with pytest.raises(ProtocolError):
            decode(encoded.body, broken)
        check_cost(encoded.body, broken)


contents = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=20)
    | st.sampled_from(["<f8", "|V8", "float32", "bfloat16", "O", "nn", "M8[ns]", "U3", "i4,i4", "(3,)i4", "bytes"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip


@settings(max_examples=150)
@given(
    st.integers(-128, 127).filter(lambda code: code != OBJECT), contents, st.lists(st.binary(max_size=64), max_size=3)
)
def test_extensions_of_any_content_are_refused_or_some_value(code: int, content: Any, buffers: list[bytes]) -> None:
    check_cost(pack(Ext(code, pack(content))), buffers)


@given(
    st.sampled_from([b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9", b"\xdc\xff\xff", b"\x91", b"\x81\xa0"]),
    st.integers(0, 2**32 - 1),
    st.integers(1, 3000),
)
def test_sizes_that_are_claimed_and_not_there_cost_nothing(head: bytes, size: int, times: int) -> None:
    """Each level may claim as many items as there are bytes: a decoder that made room for them would need gigabytes."""
    claim = head + (size.to_bytes(4, "big") if len(head) == 1 and head != b"\x91" else b"")
    check_cost(claim * times + bytes(1000), [])


@pytest.mark.parametrize("depth", [200, 3000])
@pytest.mark.parametrize("code", sorted({*range(1, 17)} - {INT, TEXT}))
def test_extensions_within_extensions_end(code: int, depth: int) -> None:
    body = pack([])
    for _ in range(depth):
        body = pack(Ext(code, body))
    assert isinstance(refusal_of(lambda: decode(body)), ProtocolError)


def test_a_body_that_contains_itself_is_refused() -> None:
    itself = pack(Ext(14, pack(0)))
    assert isinstance(refusal_of(lambda: decode(itself, [itself])), ProtocolError)


@pytest.mark.parametrize(
    ("code", "content"),
    [
        (BYTES, [1, SIZE]),
        (BYTEARRAY, [1, SIZE]),
        (ARRAY, ["|u1", [SIZE], False, 1]),
        (SERIALIZED, [1, 0, 0]),
        (SERIALIZED, [b"", 0, 2]),
        (BODY, 1),
        (DEVICE, [0, False]),
    ],
)
def test_a_buffer_that_is_named_many_times_is_not_copied_as_often(code: int, content: Any) -> None:
    """Or a few hundred bytes of body would cost a hundred times the frame."""
    buffers = [pack([cuda.BYTES, "uint8", [SIZE]]), pack(bytes(SIZE - 5))]
    one = pack([Ext(code, pack(content))])
    assert refusal_of(lambda: decode(one, buffers)) is None
    body = pack([Ext(code, pack(content))] * 100)
    assert isinstance(refusal_of(lambda: decode(body, buffers)), ProtocolError)
    check_cost(body, buffers)


@pytest.mark.parametrize("decode_it", [decode, lambda *value: deserialize(SerializedValue(*value))])
def test_a_buffer_that_many_tensors_name_is_one_memory(decode_it: Callable[..., Any]) -> None:
    """As tied weights do."""
    ties = decode_it(pack([Ext(TENSOR, pack(["uint8", [SIZE], False, 0]))] * 100), [bytes(SIZE)])
    ties[0][5] = 7
    assert len(ties) == 100
    assert {int(tie[5]) for tie in ties} == {7}


def test_a_shape_of_very_many_sizes_is_not_multiplied_out() -> None:
    body = pack(Ext(7, pack(["<f8", [2**63] * 50_000, False, b""])))
    assert isinstance(refusal_of(lambda: decode(body)), ProtocolError)


def test_examples_of_types_that_only_pickle_can_carry() -> None:
    value = [decimal.Decimal("1.50"), fractions.Fraction(1, 3), uuid.UUID(int=5), range(3), slice(1, 2), Record]
    assert over_the_wire(value) == value
