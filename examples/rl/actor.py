"""ACTOR: trains the policy, data-parallel over two ranks, and sends it to those who write with it."""

from __future__ import annotations

import threading

import grpo
import torch
import torch.distributed as dist
from model import Policy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from trainer import EXPERIENCE

from unified import DataQueue, RoleGroup, current_worker, rpc


class Actor:
    """One rank. The runtime has already called `init_process_group`."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.config = config = current_worker().job_info.user_config
        self.policy = Policy(config.length, seed=config.seed)
        self.model = DistributedDataParallel(self.policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)
        steps = config.iterations * config.updates
        self.schedule = LambdaLR(self.optimizer, lambda step: max(0.1, 1 - step / steps))
        self.version = 0
        """Batches of experience that the policy has learnt from. Version 0 is what every role can make by itself."""
        self.settled = threading.Lock()
        """Held while policy and version do not belong together."""

    def run(self) -> None:
        """Learn from experience until there is no more."""
        # Each rank takes one share of a batch, whichever: gradients are averaged before either can go on.
        for share in DataQueue[dict[str, torch.Tensor]](EXPERIENCE):
            with self.settled:
                for _ in range(self.config.updates):
                    self.update(share)
                self.version += 1
            if dist.get_rank() == 0:
                self.send_weights()

    def update(self, share: dict[str, torch.Tensor]) -> None:
        """One step of the optimizer."""
        loss = grpo.loss(
            self.model(share["texts"]),
            share["old"],
            share["reference"],
            share["advantage"],
            clip=self.config.clip,
            kl_weight=self.config.kl_weight,
        )
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()

    @rpc
    def send_weights(self) -> None:
        """Send the policy to all rollouts; one that started since the last time asks for it."""
        with self.settled:
            if self.version > 0:
                RoleGroup("ROLLOUT").sync_weights(self.policy, version=self.version)
