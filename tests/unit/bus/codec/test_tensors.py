"""Tensors of every kind, wherever they hide: right, or a clear error; never more bytes than they have."""

import collections
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unified.bus.codec.codec import OUT_OF_BAND_BYTES, decode, deserialize, encode

LARGE = OUT_OF_BAND_BYTES // 4


@dataclasses.dataclass
class Holder:
    content: Any


WRAPS: list[Callable[[Any], Any]] = [lambda it: it, lambda it: {"a": [(it,)]}, Holder, lambda it: {"x": Holder([it])}]
UNWRAPS: list[Callable[[Any], Any]] = [
    lambda it: it,
    lambda it: it["a"][0][0],
    lambda it: it.content,
    lambda it: it["x"].content[0],
]
ALL_DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).startswith("torch.q")
    },
    key=str,
)
"""But the quantized: torch makes them by other ways, and crashes on this one."""


def over_the_wire(value: Any) -> Any:
    encoded = encode(value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of memory that it may not write to
        warnings.filterwarnings("ignore", "B?Complex(32|Half) support is experimental")
        return decode(encoded.body, [memoryview(bytearray(buffer)) for buffer in encoded.buffers])


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.numel() and flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.filterwarnings("ignore:BComplex32 support is experimental")
def test_every_dtype_comes_back(dtype: torch.dtype) -> None:
    try:
        tensor = torch.arange(LARGE * 8, dtype=torch.uint8).view(dtype)
    except (RuntimeError, TypeError, NotImplementedError):
        pytest.skip("torch makes no such tensors")
    for each in (tensor, tensor[:3], tensor[:0], tensor[0]):
        for wrap, unwrap in zip(WRAPS, UNWRAPS, strict=True):
            back = unwrap(over_the_wire(wrap(each)))
            assert (back.dtype, back.shape) == (each.dtype, each.shape)
            assert bits(back) == bits(each)


@given(
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.sampled_from(
        [torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.complex64, torch.int64, torch.uint8]
    )
    | st.sampled_from([torch.float8_e5m2, torch.float8_e4m3fn]),
    st.data(),
)
def test_tensors_however_they_lie(shape: tuple[int, ...], dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = torch.randn(shape).to(dtype)
    if shape:
        tensor = tensor.permute(*data.draw(st.permutations(range(len(shape)))))
        tensor = tensor[:: data.draw(st.integers(1, 2))]
    number = data.draw(st.integers(0, 3))
    back = UNWRAPS[number](over_the_wire(WRAPS[number](tensor)))
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert bits(back) == bits(tensor)
    assert (back.stride() == tensor.stride()) or back.is_contiguous()


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(LARGE).expand(3, LARGE),
        lambda: torch.randn(3, LARGE).flip(0),
        lambda: torch.view_as_complex(torch.randn(LARGE, 2)).conj(),
        lambda: torch.view_as_complex(torch.randn(LARGE, 2)).conj().imag,
        lambda: torch.randn(LARGE)[5:7],
        lambda: torch.randn(2, 3, 0),
        lambda: torch.tensor(3.5),
        lambda: torch.randn(LARGE * 2)[::2],
        lambda: torch.randn(200, 300).T,
    ],
    ids=["expanded", "flipped", "conjugate", "negative", "small view", "empty", "0-d", "strided", "transposed"],
)
def test_views(make: Callable[[], torch.Tensor], number: int) -> None:
    tensor = make()
    back = UNWRAPS[number](over_the_wire(WRAPS[number](tensor)))
    assert torch.equal(back, tensor)
    assert back.dtype == tensor.dtype


@pytest.mark.parametrize("number", range(4))
def test_of_a_small_view_only_the_view_is_sent(number: int) -> None:
    base = torch.zeros(10_000_000)
    assert encode(WRAPS[number](base[:100])).nbytes < 1500
    assert encode(WRAPS[number](base[:LARGE])).nbytes < OUT_OF_BAND_BYTES + 1500


@pytest.mark.parametrize("number", range(4))
def test_requires_grad_is_kept_and_history_is_not(number: int) -> None:
    leaf = torch.ones(LARGE, requires_grad=True)
    for tensor in (leaf, leaf * 2):
        back = UNWRAPS[number](over_the_wire(WRAPS[number](tensor)))
        assert back.requires_grad
        assert back.is_leaf
        assert torch.equal(back, tensor)
    (back * 3).sum().backward()
    assert back.grad is not None


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(200).to_sparse(),
        lambda: torch.eye(200).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.randn(LARGE), 0.1, 3, torch.qint8),
        lambda: torch.empty(LARGE, device="meta"),
        lambda: torch.nn.Parameter(torch.randn(LARGE)),
        lambda: torch.nn.Buffer(torch.randn(LARGE)),
    ],
    ids=["coo", "csr", "quantized", "meta", "parameter", "buffer"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:.*[qQ]uantiz.*")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_tensors_that_are_no_plain_memory(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    for wrap, unwrap in zip(WRAPS, UNWRAPS, strict=True):
        encoded = encode(wrap(tensor))
        back = unwrap(decode(encoded.body, [memoryview(bytearray(buffer)) for buffer in encoded.buffers]))
        assert type(back) is type(tensor)
        found = (back.layout, back.dtype, back.device, back.shape)
        assert found == (tensor.layout, tensor.dtype, tensor.device, tensor.shape)
        if tensor.layout is not torch.strided:
            assert torch.equal(back.to_dense(), tensor.to_dense())
        elif not tensor.is_meta:
            assert torch.equal(back, tensor)


def test_attributes_of_the_users_are_kept() -> None:
    tensor = torch.ones(3)
    tensor.__dict__["note"] = "mine"
    assert over_the_wire([tensor])[0].note == "mine"


def test_state_dicts() -> None:
    state = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.BatchNorm1d(100)).state_dict()
    encoded = encode(state)
    assert sum(memoryview(buffer).nbytes for buffer in encoded.buffers) == 100 * 100 * 4
    back = over_the_wire(state)
    assert type(back) is collections.OrderedDict
    assert vars(back) == vars(state) != {}
    assert list(back) == list(state)
    torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.BatchNorm1d(100)).load_state_dict(back)
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_a_module_with_tied_weights_stays_tied() -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(100, 100), "head": torch.nn.Linear(100, 100, bias=False)})
    model["head"].weight = model["embed"].weight
    back = over_the_wire(model)
    assert back["head"].weight is back["embed"].weight
    assert back["head"].weight.requires_grad


@pytest.mark.parametrize("wrap", [dict, collections.OrderedDict])
def test_the_same_memory_is_sent_once(wrap: type[dict[str, torch.Tensor]]) -> None:
    weight = torch.randn(100, 100)
    value = wrap(embed=weight, head=weight.detach(), other=weight.clone())
    assert encode(value).nbytes < 2 * 40_000 + 1500
    back = over_the_wire(value)
    assert all(torch.equal(back[key], weight) for key in value)
    back["embed"] += 1
    assert torch.equal(back["embed"], back["head"])
    assert torch.equal(back["other"], weight)


def test_memory_that_is_used_again_within_one_value_is_not_taken_for_the_same() -> None:
    class Lazy:
        def __init__(self, item: float) -> None:
            self.item = item

        def __reduce__(self) -> Any:
            return Holder, (torch.full((LARGE,), self.item),)

    back = over_the_wire([Lazy(float(item)) for item in range(10)])
    assert [float(holder.content[0]) for holder in back] == [float(item) for item in range(10)]


def test_a_sealed_tensor_can_be_opened_twice() -> None:
    tensor = torch.zeros(LARGE)
    for sealed in (encode(tensor), over_the_wire([encode(tensor)])[0]):
        first = deserialize(sealed)
        first += 1
        assert deserialize(sealed).sum() == 0
    assert tensor.sum() == 0, "decoded where it was serialized, it is not the caller's own memory"
