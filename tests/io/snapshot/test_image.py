"""Images of states: what goes in comes out, in place or anew."""

import collections
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from unified.errors import SnapshotError, UsageError
from unified.snapshot.worker.image import StateImage, read_state


class Image:
    """A state in memory."""

    def __init__(self, state: object) -> None:
        image = StateImage(state)
        self.memory = bytearray(image.length)
        image.write(self.memory)

    def read(self, into: object = None) -> Any:
        return read_state(memoryview(self.memory), into)

    def erase(self) -> None:
        self.memory[:] = bytes(len(self.memory))


def test_a_nest_of_values_comes_back() -> None:
    tied = torch.arange(6.0)
    state: dict[Any, Any] = {
        "tensor": torch.arange(12).view(3, 4).t(),
        "tied": [tied, tied],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "parameter": nn.Parameter(torch.ones(2)),
        "array": np.arange(5)[::2],
        "random": (torch.get_rng_state(), np.random.default_rng(0).bit_generator.state),
        3: collections.OrderedDict(a=(1, None, "text", b"bytes", 2.5)),
        "sparse": torch.eye(3).to_sparse(),
    }
    found = Image(state).read()
    assert list(found) == list(state)
    assert torch.equal(found["tensor"], state["tensor"])
    assert found["tied"][0].data_ptr() == found["tied"][1].data_ptr()
    assert found["empty"].shape == (0, 3)
    assert found["scalar"].dtype == torch.bfloat16
    assert found["scalar"] == 3.5
    assert isinstance(found["parameter"], nn.Parameter)
    assert found["array"].tolist() == [0, 2, 4]
    assert torch.equal(found["random"][0], state["random"][0])
    assert found["random"][1] == state["random"][1]
    assert found[3] == state[3]
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3))


def test_a_state_is_copied_as_it_is_when_it_is_written() -> None:
    weights = torch.zeros(10)
    memory = Image({"weights": weights})
    weights += 1
    assert memory.read()["weights"].sum() == 0


@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh", "used"])
def test_modules_and_optimizers_at_the_top_are_filled(is_fresh: bool) -> None:
    def make() -> tuple[nn.Linear, torch.optim.Optimizer]:
        model = nn.Linear(4, 4)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    model, optimizer = make()
    train(model, optimizer)
    memory = Image({"model": model, "optimizer": optimizer, "step": 7})
    other, other_optimizer = make()
    if not is_fresh:
        train(other, other_optimizer)
    parameter = other.weight
    state = {"model": other, "optimizer": other_optimizer, "step": 0}
    assert memory.read(state) is state
    memory.erase()  # what was filled has nothing to do with the image any more
    assert state["step"] == 7
    assert other.weight is parameter
    assert torch.equal(other.weight, model.weight)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        moments, others = optimizer.state[one], other_optimizer.state[two]
        assert torch.equal(moments["exp_avg"], others["exp_avg"])
        assert moments["step"] == others["step"]
    train(model, optimizer)
    train(other, other_optimizer)
    assert torch.equal(other.weight, model.weight)


def test_values_that_are_replaced_are_in_memory_of_their_own() -> None:
    memory = Image({"weights": torch.ones(4), "more": [torch.ones(4), np.ones(4)]})
    state: dict[str, Any] = {"weights": torch.zeros(4), "more": None}
    memory.read(state)
    memory.erase()
    tensor, array = state["more"]
    assert tensor.sum() == 4
    assert array.sum() == 4


@pytest.mark.parametrize(
    ("state", "filled"),
    [
        ({"used": {}, "step": 0}, {"used": {"a": 1, "b": {"c": [2]}}, "step": 3}),
        ({"used": {"b": {}}}, {"used": {"a": 1, "b": {"c": [2]}}}),
        ({"step": 0}, {"step": 3}),  # the caller wants the step only
        ({}, {"used": {"a": 1, "b": {"c": [2]}}, "step": 3}),
    ],
)
def test_a_dict_that_was_empty_at_the_start_has_all_its_keys_again(state: Any, filled: Any) -> None:
    assert Image({"used": {"a": 1, "b": {"c": [2]}}, "step": 3}).read(state) is state
    assert state == filled


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"weights": torch.ones(3)}, r"state\['weights'\] has the shape \[3\], and in the snapshot \[4\]"),
        ({"weights": torch.ones(4), "more": 1}, r"the snapshot has no state\['more'\]; there are \['weights'\]"),
        ({"weights": {}}, r"state\['weights'\] is a dict, and in the snapshot it is a Tensor"),
        ([torch.ones(4)], ""),
    ],
)
def test_a_state_of_another_form_is_refused(state: object, words: str) -> None:
    memory = Image({"weights": torch.ones(4)})
    if not words:
        assert memory.read(state).keys() == {"weights"}
        return
    with pytest.raises(SnapshotError, match=words):
        memory.read(state)


def test_what_cannot_be_pickled_is_refused_before_anything_is_written() -> None:
    with pytest.raises(UsageError, match=r"cannot be pickled.*Remove these"):
        StateImage({"loss": lambda value: value})


@pytest.mark.parametrize("damage", [b"", b"x" * 100, b"UNISNAP1" + b"\xff" * 100])
def test_what_is_no_image_is_refused(damage: bytes) -> None:
    with pytest.raises(SnapshotError, match="cannot be read"):
        read_state(memoryview(damage.ljust(200, b"\0")))


def test_an_image_without_its_end_is_refused() -> None:
    memory = Image({"weights": torch.ones(1000)}).memory
    (start,) = struct.unpack_from("<Q", memory, 16)
    index = memory[start:]
    memory[100:] = index
    struct.pack_into("<QQ", memory, 8, len(memory), 100)
    with pytest.raises(SnapshotError, match=r"it ends at \d+, within a tensor"):
        read_state(memoryview(memory))


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    """A device mesh of this process alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = distributed.HashStore()  # type: ignore[attr-defined]  # torch exports it without saying so
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_pieces_of_sharded_tensors_come_back_where_the_state_has_them(mesh: DeviceMesh) -> None:
    def make(value: float) -> tuple[nn.Linear, torch.optim.Optimizer]:
        model = nn.Linear(4, 4)
        nn.init.constant_(model.weight, value)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = make(1.0)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    image = Image({"model": model, "optimizer": optimizer})
    other, other_optimizer = make(2.0)
    image.read({"model": other, "optimizer": other_optimizer})
    image.erase()
    assert isinstance(other.weight, DTensor)
    assert isinstance(model.weight, DTensor)
    assert torch.equal(other.weight.to_local(), model.weight.to_local())
    moment = other_optimizer.state[other.weight]["exp_avg"]
    assert isinstance(moment, DTensor)
    assert torch.equal(moment.to_local(), optimizer.state[model.weight]["exp_avg"].to_local())
    with pytest.raises(SnapshotError, match="none on such a mesh"):
        Image({"model": model}).read()
