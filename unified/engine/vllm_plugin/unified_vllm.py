"""vLLM's weight transfer backend `unified`: maps segments of shared memory that a worker names, and loads them.

The worker of an engine puts this folder into vLLM's `PYTHONPATH`. vLLM finds `register` by the entry point in a folder
beside this file. The module imports nothing of Unified: vLLM's environment need not have it.
"""

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory


def register() -> None:
    """Make the backend known to vLLM; called in each of its processes, in some more than once."""
    if "unified" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("unified", SharedMemoryEngine)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing: there is no process group."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Location of each tensor: name, torch's name of the dtype, shape, file, offset in bytes."""

    tensors: list[tuple[str, str, list[int], str, int]]


class SharedMemoryEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:  # the base class's synchronises an accelerator
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.model.load_weights(_tensors(update_info))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


def _tensors(update_info: UpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
    mapped: dict[str, mmap.mmap] = {}
    for name, dtype, shape, path, offset in update_info.tensors:
        if path not in mapped:
            with open(path, "rb") as file:
                mapped[path] = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)  # torch warns of read-only memory
        count = math.prod(shape)
        flat = torch.frombuffer(mapped[path], dtype=getattr(torch, dtype), count=count, offset=offset)
        yield name, flat.view(shape)
