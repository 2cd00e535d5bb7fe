"""State of a replica on its way to another rank: tensors go as they are, all else as one pickled value.

A model's tensors are received in place, so that the receiver needs no memory for a second model. A new process has no
tensors of an optimizer yet; the received ones become its state.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

from unified.errors import ElasticError

if TYPE_CHECKING:
    import torch

_IN_BAND = 4096
"""Tensors of at most so many bytes are pickled with the rest, as a message of their own would take longer."""


def send(models: dict[str, Any], rest: Any, receiver: int) -> None:
    """Send a rank of the default process group the state of `models`, and `rest`, which may hold tensors anywhere."""
    from torch import distributed

    device = _device()
    file = io.BytesIO()
    pickler = _ReplicaPickler(file)
    pickler.dump(rest)
    meta = [(tensor.shape, tensor.dtype, tensor.device.type) for tensor in pickler.tensors]
    distributed.send_object_list([_layout(models), file.getvalue(), meta], receiver, device=device)
    for tensor in [*_tensors(models), *pickler.tensors]:
        distributed.send(tensor.detach().to(device).contiguous(), receiver)


def receive(models: dict[str, Any], sender: int) -> Any:
    """Receive the state of `models` from a rank, and return the rest.

    Raises:
        ElasticError: the sender's models are built differently.
    """
    import torch
    from torch import distributed

    device = _device()
    box: list[Any] = [None, None, None]
    distributed.recv_object_list(box, sender, device=device)
    layout, data, meta = box
    if layout != _layout(models):
        raise ElasticError(
            f"rank {sender} has models built otherwise than this process: a replacement runs the same code with the "
            "same configuration, so look for what depends on the rank, or on time."
        )
    received: list[torch.Tensor] = []
    targets = _tensors(models)
    with torch.no_grad():
        for target in targets:
            is_fit = target.device.type == device.type and target.is_contiguous()
            tensor = target.detach() if is_fit else torch.empty(target.shape, dtype=target.dtype, device=device)
            distributed.recv(tensor, sender)
            if not is_fit:
                target.copy_(tensor)
    for shape, dtype, kind in meta:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        distributed.recv(tensor, sender)
        received.append(tensor if kind == device.type else tensor.to(kind))
    return _ReplicaUnpickler(io.BytesIO(data), received).load()


class _ReplicaPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[object, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        import torch

        from unified.tensors.walk import identity_of

        if not isinstance(value, torch.Tensor) or value.nbytes <= _IN_BAND:
            return None
        number = self._numbers.setdefault(identity_of(value), len(self.tensors))
        if number == len(self.tensors):  # tied tensors are sent once, and are tied at the receiver
            self.tensors.append(value)
        return number


class _ReplicaUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: Any) -> Any:
        return self._tensors[number]


def _tensors(models: dict[str, Any]) -> list[torch.Tensor]:
    return [tensor for _, _, tensor in _named(models)]


def _layout(models: dict[str, Any]) -> list[tuple[str, str, tuple[int, ...], str]]:
    return [(model, name, tuple(tensor.shape), str(tensor.dtype)) for model, name, tensor in _named(models)]


def _named(models: dict[str, Any]) -> list[tuple[str, str, torch.Tensor]]:
    """Return each model's tensors, in the same order on all ranks."""
    import torch

    return [
        (model, name, tensor)
        for model, module in sorted(models.items())
        for name, tensor in module.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    ]


def _device() -> torch.device:
    """Return the device whose tensors the default process group sends."""
    import torch
    from torch import distributed

    if "gloo" in distributed.get_backend():
        return torch.device("cpu")
    return torch.device(str(torch.accelerator.current_accelerator()), torch.accelerator.current_device_index())
