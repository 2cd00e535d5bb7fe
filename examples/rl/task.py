"""The task: sort digits. Nobody shows the policy a sorted list; it is told only how much of its answer was right."""

from __future__ import annotations

import torch
from model import DIGITS
from torch import Tensor


def draw_prompts(number: int, length: int, seed: int) -> Tensor:
    """``(number, length)`` random digits, int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(DIGITS, (number, length), generator=generator)


def score(texts: Tensor) -> Tensor:
    """For each whole text the share of the answer's digits, 0 to 1, that stand where sorting would put them.

    A rule that anybody can check takes the place of a reward model. Guessing scores 0.1.
    """
    length = texts.shape[1] // 2
    prompts, answers = texts[:, :length], texts[:, length + 1 :]
    return (answers == prompts.sort(dim=1).values).float().mean(dim=1)
