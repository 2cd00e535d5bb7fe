"""ROLLOUT: writes answers with the newest policy."""

from __future__ import annotations

import remote_call
import torch
from model import Policy
from remote_call import Answers
from torch import Tensor

from unified import WeightsReceiver, current_worker, rpc


class Rollout:
    """Writes answers. There are several; each has a part of the prompts."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        worker = current_worker()
        config = worker.job_info.user_config
        self.policy = Policy(config.length, seed=config.seed)
        self.version = 0
        self.weights = WeightsReceiver()
        if worker.incarnation > 0:  # an earlier incarnation had them, and took them with it
            remote_call.send_weights()

    @rpc(name=remote_call.generate, concurrency=1, idempotent=True)
    def generate(self, prompts: Tensor, seeds: list[int], group: int, version: int) -> list[Answers]:
        if version > self.version:
            self.version = self.weights.load_into(self.policy, min_version=version, timeout=60)
        generator = torch.Generator().manual_seed(seeds[0])  # the same answers, whoever writes them, and when
        texts = self.policy.answer(prompts.repeat_interleave(group, dim=0), generator)
        with torch.no_grad():
            log_probabilities = self.policy(texts)
        grouped = (tensor.unflatten(0, (-1, group)) for tensor in (texts, log_probabilities))
        return [Answers(*both) for both in zip(*grouped, strict=True)]
