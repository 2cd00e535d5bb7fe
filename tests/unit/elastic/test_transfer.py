"""State of a replica, taken apart and put together without a process group."""

import io

import torch

from unified.elastic.transfer import _ReplicaPickler, _ReplicaUnpickler


def test_tied_tensors_are_sent_once_and_are_tied_again() -> None:
    weight, other = torch.arange(5000.0), torch.ones(5000)
    file = io.BytesIO()
    pickler = _ReplicaPickler(file)
    pickler.dump(
        {"embedding": weight, "head": weight.detach(), "other": other, "half": weight[:2500], "small": torch.ones(3)}
    )
    assert len(pickler.tensors) == 3
    received = [tensor.clone() for tensor in pickler.tensors]
    state = _ReplicaUnpickler(io.BytesIO(file.getvalue()), received).load()
    assert state["head"] is state["embedding"]
    assert torch.equal(state["head"], weight)
    assert torch.equal(state["other"], other)
    assert torch.equal(state["half"], weight[:2500])
    assert torch.equal(state["small"], torch.ones(3))
