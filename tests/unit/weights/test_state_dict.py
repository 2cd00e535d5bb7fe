"""What of a model is sent, once each, and that it is in order where it arrives."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from unified.errors import UsageError
from unified.memory.host_buffers import BufferPool
from unified.protocol.records import WorkerIncarnation
from unified.weights.sender import stage_bucket
from unified.weights.state_dict import OutgoingStateDict, check_bucket, unwrap
from unified.weights.transfer_plan import Bucket, TransferPlan


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.root = torch.nn.Linear(3, 5, bias=False)
        self.root.weight = self.embedding.weight

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 7}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def plan_of(source: OutgoingStateDict, buckets: tuple[Bucket, ...], version: int = 1) -> TransferPlan:
    return TransferPlan(
        session="s",
        version=version,
        buckets=buckets,
        keys=source.keys,
        aliases=source.aliases,
        others=source.others,
        metadata=source.metadata,
        senders=(WorkerIncarnation("a", 0),),
        children={},
        stays_shared=True,
        timeout_s=1.0,
        force=False,
    )


def test_tied_tensors_go_once_and_what_is_no_tensor_goes_beside() -> None:
    model = Tied()
    source = OutgoingStateDict(model)
    assert [entry.key for entry in source.entries] == [
        "embedding.weight",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    assert source.aliases == {"root.weight": "embedding.weight"}
    assert source.others == {"_extra_state": {"steps": 7}}
    assert source.keys == tuple(model.state_dict())


def test_views_that_only_overlap_are_not_tied() -> None:
    base = torch.arange(6.0)
    state = {"all": base, "root": base[:3], "same": base[:3], "turned": base.view(2, 3).t(), "empty": base[:0]}
    assert OutgoingStateDict(state).aliases == {"same": "root"}


def test_a_cast_is_for_floating_point_alone() -> None:
    source = OutgoingStateDict(Tied(), torch.bfloat16)
    assert {entry.key: entry.dtype for entry in source.entries if entry.dtype != "bfloat16"} == {
        "norm.num_batches_tracked": "int64"
    }
    assert source.entries[0].nbytes == 5 * 3 * 2
    with pytest.raises(UsageError, match="floating-point dtype"):
        OutgoingStateDict(Tied(), torch.int8)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (3, "a torch module or its state dict, not a int"),
        ({4: torch.ones(1)}, "the key 4 of the state dict is no string"),
        ({"w": torch.ones(1, device="meta")}, "'w' is on the meta device"),
    ],
)
def test_what_cannot_be_sent(weights: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        OutgoingStateDict(weights)


def test_a_sparse_tensor_goes_beside() -> None:
    source = OutgoingStateDict({"w": torch.eye(3).to_sparse(), "v": torch.ones(2)})
    assert list(source.others) == ["w"]
    assert [entry.key for entry in source.entries] == ["v"]


def test_wrappers_are_looked_through() -> None:
    model = torch.nn.Linear(2, 2)
    compiled = torch.compile(torch.nn.DataParallel(model), backend="eager")
    assert isinstance(compiled, torch.nn.Module)
    assert unwrap(compiled) is model
    assert OutgoingStateDict(compiled).keys == ("weight", "bias")


def test_the_models_own_memory_is_sent_where_that_can_be() -> None:
    state = {"w": torch.arange(4.0), "turned": torch.arange(6.0).view(2, 3).t()}
    source = OutgoingStateDict(state)
    (bucket,) = source.cut(1000, 1)
    tensors = [source.collect(entry) for entry in bucket.entries]
    assert all(map(source.is_models, bucket.entries, tensors))
    (first,) = source.cut(16, 1)[:1]
    staged = stage_bucket(first, tensors[:1], BufferPool(), {}, keep=False)
    assert staged.value[0].data_ptr() == state["w"].data_ptr()
    staged = stage_bucket(bucket, tensors, BufferPool(), {}, keep=False)
    assert all(tensor.is_contiguous() for tensor in staged.value)
    assert torch.equal(staged.value[1], state["turned"])


def test_what_is_kept_does_not_change_with_the_model() -> None:
    state = {"w": torch.ones(3), "n": torch.tensor(5), "none": torch.ones(0, 3), "flag": torch.tensor([True, False])}
    source = OutgoingStateDict(state, torch.float16)
    (bucket,) = source.cut(1000, 1)
    pool = BufferPool()
    staged = stage_bucket(bucket, [source.collect(entry) for entry in bucket.entries], pool, {}, keep=True)
    staged.wait()
    state["w"].fill_(9)
    assert [(tensor.dtype, tensor.tolist()) for tensor in staged.value] == [
        (torch.float16, [1.0, 1.0, 1.0]),
        (torch.int64, 5),
        (torch.float16, []),
        (torch.bool, [True, False]),
    ]
    memory = staged.memory
    assert memory is not None
    address = memory.data_ptr()
    staged.release()
    again = stage_bucket(bucket, [source.collect(entry) for entry in bucket.entries], pool, {}, keep=True)
    assert again.memory is not None
    assert again.memory.data_ptr() == address
    again.release()
    pool.trim()
    assert pool._idle == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory and streams need a CUDA device")
def test_off_a_gpu_through_pinned_memory() -> None:
    state = {"w": torch.randn(1000, 1000, device="cuda"), "n": torch.tensor(3, device="cuda"), "b": torch.ones(5)}
    source = OutgoingStateDict(state, torch.bfloat16)
    buckets = source.cut(1 << 20, 1)
    expected = {key: value.cpu().to(torch.bfloat16) if key != "n" else value.cpu() for key, value in state.items()}
    pool, streams = BufferPool(), dict[torch.device, Any]()
    staged = [
        stage_bucket(each, [source.collect(entry) for entry in each.entries], pool, streams, keep=True)
        for each in buckets
    ]
    for each in staged:
        each.wait()
    for value in state.values():
        value.fill_(0)
    for bucket, each in zip(buckets, staged, strict=True):
        assert each.memory is not None
        assert each.memory.is_pinned() == any(state[entry.key].is_cuda for entry in bucket.entries)
        for entry, tensor in zip(bucket.entries, each.value, strict=True):
            assert torch.equal(tensor, expected[entry.key])


def test_a_bucket_is_checked_against_what_was_announced() -> None:
    source = OutgoingStateDict(OrderedDict(w=torch.ones(2, 3), b=torch.ones(3)))
    plan = plan_of(source, source.cut(1000, 1))
    good = [torch.zeros(2, 3), torch.zeros(3)]
    assert check_bucket(plan, 0, good) == good
    with pytest.raises(UsageError, match=r"shape \[3, 2\] where 'w'"):
        check_bucket(plan, 0, [torch.zeros(3, 2), torch.zeros(3)])
    with pytest.raises(UsageError, match=r"torch.int64 of shape \[3\] where 'b'"):
        check_bucket(plan, 0, [good[0], torch.zeros(3, dtype=torch.int64)])
    for wrong in ([good[0]], [*good, torch.zeros(1)], [good[0], "b"]):
        with pytest.raises(UsageError, match="tensors"):
            check_bucket(plan, 0, wrong)
