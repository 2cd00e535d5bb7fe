"""REFERENCE: what the policy should not stray from too far."""

from __future__ import annotations

import torch
from model import Policy
from torch import Tensor

from unified import current_worker, rpc


class Reference:
    """The policy as it was before training.

    This one writes every digit with the same probability, so that the divergence from it is a price on certainty: it
    keeps the policy trying things. Put a pretrained model here, and it keeps what that model knows.
    """

    def __init__(self) -> None:
        torch.set_num_threads(1)
        config = current_worker().job_info.user_config
        self.policy = Policy(config.length, seed=config.seed)

    @rpc
    @torch.no_grad()
    def refer(self, texts: Tensor) -> Tensor:
        """Log-probabilities of the answers' digits."""
        log_probabilities: Tensor = self.policy(texts)
        return log_probabilities
