"""A state dict as the bytes that torch reads, and the copies that it is made of."""

import io

import pytest

torch = pytest.importorskip("torch")

from unified.checkpoint.state_stream import stream  # noqa: E402
from unified.tensors import copy as memory_copy  # noqa: E402 - torch may be missing
from unified.tensors.host_buffers import BufferPool, stage_state  # noqa: E402


def test_torch_reads_the_stream_and_its_own_files_keep_their_checksums() -> None:
    tree = {"large": torch.rand(300_000), "small": [torch.arange(3)], "epoch": 7}
    loaded = torch.load(io.BytesIO(b"".join(bytes(chunk) for chunk in stream(tree))))
    assert torch.equal(loaded["large"], tree["large"])
    assert torch.equal(loaded["small"][0], tree["small"][0])
    assert loaded["epoch"] == 7
    assert torch.serialization.get_crc32_options()


def test_copies_are_of_every_kind_of_tensor_and_of_that_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_copy, "SLICE_NBYTES", 256)
    weight = torch.rand(70, 30)
    state = {
        "whole": weight,
        "turned": weight.t(),
        "rows": weight[3:9],
        "column": weight[:, 4],
        "parameter": torch.nn.Parameter(torch.rand(11)),
        "half": torch.rand(1001).bfloat16(),
        "flag": torch.tensor(True),
        "empty": torch.empty(0, 4),
    }
    before = {name: tensor.detach().clone() for name, tensor in state.items()}
    staged = stage_state(state, BufferPool())
    for tensor in state.values():
        tensor.detach().zero_()
    for name, tensor in before.items():
        assert torch.equal(staged.value[name].detach(), tensor), name
        assert staged.value[name].shape == tensor.shape
    assert isinstance(staged.value["parameter"], torch.nn.Parameter)
