"""vLLM's weight sync client for the engines of a role: vLLM's trainer sends the weights, and asks for it by calls."""

from __future__ import annotations

import base64
import pickle
from itertools import accumulate
from typing import Any


class VLLMWeightSyncClient:
    """The `client` of vLLM's `WeightTransferTrainerFactory.trainer_init`, for all engines of a role.

    Each method sends its request to all engines at once, and returns when all have answered, or raises the first error,
    such as an `EngineError` or a `WorkerDiedError`, which names the engine.

    Args:
        group: ``RoleGroup("rollout")``, whose engines have a ``--weight-transfer-config`` of their own.
        timeout: seconds for a request.
    """

    def __init__(self, group: Any, timeout: float = 300.0) -> None:
        self.group = group
        self.timeout = timeout

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        infos = [init_info] * len(self.group)
        if len(infos) > 1 and "rank_offset" in init_info:  # of NCCL: each engine's ranks follow those of the one before
            sizes = [answer["world_size"] for answer in self._ask("GET", "/get_world_size")]
            offsets = accumulate(sizes, initial=init_info["rank_offset"])
            infos = [{**info, "rank_offset": offset} for info, offset in zip(infos, offsets, strict=False)]
        self._ask("POST", "/init_weight_transfer_engine", *({"init_info": info} for info in infos))

    def start_weight_update(self) -> None:
        self._ask("POST", "/start_weight_update")

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        infos = [dict(each) for each in (update_info if isinstance(update_info, list) else [update_info])]
        for each in infos:
            if each.get("ipc_handles") is not None:  # JSON cannot hold them: vLLM's HTTP client pickles them, too
                each["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(each.pop("ipc_handles"))).decode()
        self._ask("POST", "/update_weights", {"update_info": infos if isinstance(update_info, list) else infos[0]})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._ask("POST", "/finish_weight_update", {"weight_version": weight_version} if weight_version else None)

    def _ask(self, method: str, path: str, *bodies: Any) -> Any:
        """Send each engine its body, or all the one there is; return their answers by rank."""
        num = len(self.group)
        each = bodies if len(bodies) == num else (bodies or (None,)) * num
        same = [method] * num, [path] * num
        return self.group.call("request", *same, each, timeout=[self.timeout] * num, _scatter=True).result()
