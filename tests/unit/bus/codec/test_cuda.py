"""Which way a CUDA tensor goes, and that either way it arrives; on a real GPU where there is one."""

import subprocess
import sys
from typing import Any

import msgspec
import pytest
import torch

from unified.bus.codec.codec import decode, encode
from unified.bus.codec.cuda import BYTES, HANDLE, choose_route, rebuild, settle
from unified.bus.codec.tensors import DeviceTensor, Outgoing, Windows
from unified.devices import cuda_devices, visible
from unified.errors import ProtocolError

UUIDS = ["GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3"]


@pytest.mark.parametrize(
    ("setting", "chosen"),
    [
        (None, UUIDS),
        ("", []),
        ("1", UUIDS[1:2]),
        ("2, 0", [UUIDS[2], UUIDS[0]]),
        ("0,7,1", UUIDS[:1]),
        ("-1", []),
        ("GPU-c", UUIDS[2:]),
        ("GPU-aa", []),
        ("1,1", UUIDS[1:2]),
        ("NoDevFiles", []),
    ],
)
def test_the_devices_that_a_process_sees(setting: str | None, chosen: list[str]) -> None:
    assert [UUIDS[number] for number in visible([(str(i), uuid) for i, uuid in enumerate(UUIDS)], setting)] == chosen


def test_no_device_is_seen_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified.devices.has_accelerator", lambda: False)
    assert cuda_devices({}) == []


@pytest.mark.parametrize(
    ("device", "seen", "is_same_process", "way"),
    [
        ("GPU-1", ["GPU-0", "GPU-1"], False, HANDLE),
        ("GPU-1", ["GPU-0"], False, BYTES),
        ("GPU-1", [], False, BYTES),
        ("", [""], False, BYTES),
        ("GPU-1", ["GPU-1"], True, BYTES),
    ],
)
def test_the_way_of_a_tensor(device: str, seen: list[str], is_same_process: bool, way: str) -> None:
    assert choose_route(device, seen, is_same_process=is_same_process) == way


@pytest.fixture
def every_tensor_is_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the codec is concerned; no GPU is needed for the way by bytes."""
    monkeypatch.setattr(Outgoing, "stays_on_device", lambda self, tensor: self._devices and tensor.numel() > 0)


@pytest.mark.usefixtures("every_tensor_is_of_a_device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_that_go_by_bytes_arrive_on_the_cpu(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 4).to(dtype)
    holder = torch.nn.Linear(4, 4)
    encoded = encode({"a": [tensor.T], "b": holder, "c": b"x" * 20_000}, devices=True)
    assert any(isinstance(buffer, DeviceTensor) for buffer in encoded.buffers)
    assert encoded.nbytes > 20_000
    buffers = settle(encoded.buffers, [])
    back = decode(encoded.body, [memoryview(bytearray(buffer)) for buffer in buffers])
    assert torch.equal(back["a"][0], tensor.T)
    assert torch.equal(back["b"].weight, holder.weight)
    assert back["b"].weight.requires_grad
    assert back["c"] == b"x" * 20_000


@pytest.mark.usefixtures("every_tensor_is_of_a_device")
def test_requires_grad_is_kept() -> None:
    tensor = torch.ones(3, requires_grad=True)
    for value in (tensor, [slice(tensor)]):
        encoded = encode(value, devices=True)
        back: Any = decode(encoded.body, settle(encoded.buffers, []))
        back = back[0].stop if isinstance(back, list) else back
        assert back.requires_grad
        assert back.is_leaf


def test_without_being_asked_tensors_are_bytes_at_once() -> None:
    assert not any(isinstance(buffer, DeviceTensor) for buffer in encode(torch.ones(10_000)).buffers)


@pytest.mark.parametrize(
    "first", [b"", b"\xc0", msgspec.msgpack.encode(["walk"]), msgspec.msgpack.encode([HANDLE, "GPU-0", b""])]
)
def test_frames_that_are_no_tensor_are_refused(first: bytes) -> None:
    body = msgspec.msgpack.encode(msgspec.msgpack.Ext(15, msgspec.msgpack.encode([0, False])))
    with pytest.raises(ProtocolError):
        decode(body, [first, b""])


def test_a_device_that_is_not_seen_here_is_named() -> None:
    with pytest.raises(ProtocolError, match="GPU-far came, which this process does not see"):
        rebuild(msgspec.msgpack.encode([HANDLE, "GPU-far", b""]), b"", Windows(is_only=True))


READER = """
import sys, torch
from unified.bus.codec.codec import decode
size = int(sys.stdin.buffer.readline())
frames = [sys.stdin.buffer.read(int(sys.stdin.buffer.readline())) for _ in range(size)]
tensor = decode(frames[0], frames[1:])["weights"]
assert tensor.is_cuda, tensor.device
tensor += 1
print(float(tensor.sum()), flush=True)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: handles need a real one")
def test_a_tensor_goes_by_handle_to_another_process() -> None:
    tensor = torch.full((1000, 1000), 2.0, device="cuda")
    seen = cuda_devices()
    encoded = encode({"weights": tensor}, devices=True)
    frames = [encoded.body, *settle(encoded.buffers, seen)]
    assert sum(map(len, frames)) < 10_000, "its bytes did not travel"
    sent = b"%d\n" % len(frames) + b"".join(b"%d\n" % len(frame) + bytes(frame) for frame in frames)
    done = subprocess.run([sys.executable, "-c", READER], input=sent, capture_output=True)
    assert (done.stdout, done.returncode) == (b"3000000.0\n", 0), done.stderr
    assert tensor.sum() == 2_000_000, "the reader's writes are its own"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: pinned memory needs one")
def test_a_tensor_of_a_device_arrives_on_the_cpu_elsewhere() -> None:
    tensor = torch.randn(1000, 1000, device="cuda").T
    for encoded in (encode([tensor]), encode([tensor], devices=True)):
        back = decode(encoded.body, [memoryview(bytearray(buffer)) for buffer in settle(encoded.buffers, [])])[0]
        assert torch.equal(back, tensor.cpu())
