"""REWARD: says how good answers are."""

from __future__ import annotations

import task
import torch
from torch import Tensor

from unified import rpc


class Reward:
    """Checks answers against the rule; a reward model would go here."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    @rpc
    def score(self, texts: Tensor) -> Tensor:
        """The reward of each text, 0 to 1."""
        return task.score(texts)
