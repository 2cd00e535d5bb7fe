"""Evaluation of all frameworks: the sum of the losses of all held-out tokens or rows, divided by their number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy

from unified.training.dataset import IGNORED

if TYPE_CHECKING:
    from unified.training.run import TrainingRun

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class HeldOutRows:
    """Held-out rows; each rank scores its share."""

    run: TrainingRun
    rows: Any
    """A sequence of rows, which `collate` takes."""
    collate: Callable[[list[Any]], Batch]
    batch_size: int
    """Rows of one rank in one forward pass."""

    def __len__(self) -> int:
        return len(self.rows)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, score: Callable[[Batch], tuple[torch.Tensor, torch.Tensor]]) -> float:
        """Return the mean loss, each row scored once. A collective.

        All ranks make the same number of passes, since ranks of a sharded model wait for each other.

        Args:
            score: returns the sum of the losses of a batch on this rank's device, and the number of losses.
        """
        rank, world_size, device = self.run.rank, self.run.world_size, self.run.device
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        at_once = self.batch_size * world_size
        model.eval()
        for begin in range(0, len(self), at_once):
            indices = range(begin + rank, min(begin + at_once, len(self)), world_size)
            batch = self.collate([self.rows[place] for place in indices or [0]])
            batch = {
                name: values.to(device, non_blocking=True) if isinstance(values, torch.Tensor) else values
                for name, values in batch.items()
            }
            sums = torch.stack([each.double() for each in score(batch)])
            if indices:
                totals += sums
        model.train()
        if world_size > 1:
            distributed.all_reduce(totals)
        loss, num_losses = totals.tolist()
        return float(loss / max(1.0, num_losses))


def score_tokens(model: Callable[..., Any], batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses of all tokens of a batch, and their number."""
    return sum_losses(model, batch), count_targets(batch)


def sum_losses(model: Callable[..., Any], batch: Batch) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    targets = batch["labels"][:, 1:].flatten()
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, ignore_index=IGNORED, reduction="sum")


def count_targets(batch: Batch) -> torch.Tensor:
    """Return the number of tokens in a batch that have a loss."""
    return (batch["labels"][:, 1:] != IGNORED).sum()
