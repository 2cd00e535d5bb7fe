"""Weights: each tensor of a model is sent once, and a version gets into a model whole, or not at all."""

import gc
from collections import OrderedDict
from typing import Any

import pytest
import torch

from unified.errors import UsageError, WeightsMismatchError
from unified.protocol.records import WorkerIncarnation
from unified.tensors.host_buffers import BufferPool
from unified.weights.receive_service import IncomingVersion
from unified.weights.sender import stage_bucket
from unified.weights.state_dict import OutgoingStateDict, VersionedStateDict, assemble, check_bucket, load, unwrap
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
    expected = [(torch.float16, [1.0, 1.0, 1.0]), (torch.int64, 5), (torch.float16, []), (torch.bool, [True, False])]
    assert [(tensor.dtype, tensor.tolist()) for tensor in staged.value] == expected
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


def sent(weights: Any, dtype: torch.dtype | None = None) -> tuple[TransferPlan, dict[str, torch.Tensor]]:
    source = OutgoingStateDict(weights, dtype)
    tensors = {entry.key: source.collect(entry).to(getattr(torch, entry.dtype)).clone() for entry in source.entries}
    return plan_of(source, source.cut(1 << 20, 1), version=7), tensors


def arrived(weights: Any, dtype: torch.dtype | None = None) -> VersionedStateDict:
    return assemble(*sent(weights, dtype))


def test_a_state_dict_arrives_as_it_was() -> None:
    model = Tied()
    state = arrived(model)
    assert list(state) == list(model.state_dict())
    assert state.version == 7
    assert state["root.weight"] is state["embedding.weight"]
    assert state._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]  # torch's own
    fresh = Tied()
    load(state, fresh, strict=True, what="it")
    assert fresh.steps == 7
    for key, value in model.state_dict().items():
        assert key == "_extra_state" or torch.equal(value, fresh.state_dict()[key])


def test_loading_casts_to_the_models_dtype() -> None:
    model = torch.nn.Linear(3, 2)
    fresh = torch.nn.Linear(3, 2)
    load(arrived(model, torch.bfloat16), fresh, strict=True, what="it")
    assert fresh.weight.dtype == torch.float32
    assert torch.equal(fresh.weight, model.weight.bfloat16().float())
    assert fresh.weight.requires_grad


def test_into_a_state_dict_in_place() -> None:
    target: dict[str, Any] = {"w": torch.zeros(2), "n": 1}
    memory = target["w"]
    load(arrived({"w": torch.ones(2), "n": 5}), target, strict=True, what="it")
    assert target["w"] is memory
    assert memory.tolist() == [1, 1]
    assert target["n"] == 5


@pytest.mark.parametrize("as_module", [True, False])
def test_what_does_not_fit_is_named_and_nothing_changes(as_module: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    other = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 3), torch.nn.Linear(1, 1, bias=False))
    before = {key: value.clone() for key, value in other.state_dict().items()}
    target = other if as_module else other.state_dict()
    with pytest.raises(WeightsMismatchError) as caught:
        load(arrived({**model.state_dict(), "extra": torch.ones(1)}), target, strict=True, what="version 7")
    text = str(caught.value)
    assert text.startswith("version 7 does not fit")
    assert "missing in the weights: 2.weight; unexpected: extra;" in text
    assert "1.weight (here [3, 2], sent [2, 2]), 1.bias (here [3], sent [2])" in text
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())


def test_kinds_that_a_copy_would_falsify_do_not_fit() -> None:
    with pytest.raises(WeightsMismatchError, match=r"w \(here torch.int64, sent torch.float32\)"):
        load(arrived({"w": torch.ones(2)}), {"w": torch.ones(2, dtype=torch.int64)}, strict=False, what="it")
    with pytest.raises(WeightsMismatchError, match=r"w \(here a Tensor, sent a int\)"):
        load(arrived({"w": 3}), {"w": torch.ones(2)}, strict=False, what="it")


def test_many_faults_are_counted() -> None:
    with pytest.raises(WeightsMismatchError, match=r"missing in the weights: k0, .*k9 and 3 more\. Nothing"):
        load(arrived({}), {f"k{i}": torch.ones(1) for i in range(13)}, strict=True, what="it")


def test_not_strict_loads_what_both_have() -> None:
    model = torch.nn.Linear(2, 2)
    load(arrived({"weight": torch.full((2, 2), 3.0), "extra": torch.ones(1)}), model, strict=False, what="it")
    assert torch.equal(model.weight, torch.full((2, 2), 3.0))
    target: dict[str, Any] = {"weight": torch.zeros(2, 2), "own": torch.zeros(1)}
    load(arrived({"weight": torch.ones(2, 2), "extra": torch.ones(1)}), target, strict=False, what="it")
    assert sorted(target) == ["own", "weight"]


def test_a_target_that_is_neither() -> None:
    with pytest.raises(UsageError, match="a torch module or its state dict, not a list"):
        load(arrived({}), [], strict=True, what="it")  # type: ignore[arg-type]  # on purpose


def filled(pool: BufferPool, value: float) -> list[torch.Tensor]:
    """A version in memory of the pool."""
    plan, tensors = sent({"w": torch.full((1000,), value), "n": torch.tensor(3), "none": torch.ones(0)})
    coming = IncomingVersion(plan, 0.0, pool.borrow(plan.nbytes))
    return coming.kept(0, [tensors[entry.key] for entry in plan.buckets[0].entries])


def test_memory_is_used_again_once_no_tensor_needs_it() -> None:
    pool = BufferPool(one_size=True, max_idle=2)
    first = filled(pool, 1.0)
    second = filled(pool, 2.0)
    assert (first[0].data_ptr(), first[0].tolist()) != (second[0].data_ptr(), second[0].tolist())
    kept = first[0][10:20]
    address = first[0].data_ptr()
    del first
    gc.collect()
    third = filled(pool, 3.0)
    assert kept.tolist() == [1.0] * 10  # a view of a part keeps all of it
    assert third[0].data_ptr() != address
    del kept, third
    gc.collect()
    again = {tensors[0].data_ptr() for tensors in (filled(pool, 4.0), filled(pool, 5.0))}
    assert address in again
    assert [tensor.tolist() for tensor in second[1:]] == [3, []]


def test_a_closed_pool_keeps_nothing() -> None:
    pool = BufferPool(one_size=True, max_idle=2)
    tensors = filled(pool, 1.0)
    pool.close()
    del tensors
    gc.collect()
    assert pool._idle == []
