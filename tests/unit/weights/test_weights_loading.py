"""A version gets into a model whole, or not at all; its memory is used again when nobody looks at it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from tests.unit.weights.test_state_dict import Tied, plan_of
from unified.errors import UsageError, WeightsMismatchError
from unified.memory.host_buffers import BufferPool
from unified.weights.receive_service import IncomingVersion
from unified.weights.state_dict import OutgoingStateDict, VersionedStateDict, assemble, load
from unified.weights.transfer_plan import TransferPlan


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
