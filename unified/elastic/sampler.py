"""Order of samples that goes on where training is, also with other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unified.core.permutation import Permutation
from unified.errors import UsageError


class ElasticSampler:
    """Batches of this rank: each step takes the next `batch_size` samples for every rank, in an order that all share.

    The position counts samples of all ranks. It moves with `ElasticState.commit`, not with a data loader that reads
    ahead: a repeated step reads the same samples, and a round of more or fewer ranks goes on behind them. Give the
    sampler to a new `DataLoader` in each round, as `batch_sampler`. An epoch ends where less is left than all ranks
    need.

    Args:
        length: number of samples.
        batch_size: of one rank.
        shuffle: use another order in each epoch, the same on all ranks.
        seed: of the order.
    """

    def __init__(self, length: int, batch_size: int, *, shuffle: bool = True, seed: int = 0) -> None:
        if length < 1 or batch_size < 1:
            raise UsageError(f"ElasticSampler needs samples and a batch size: {length=}, {batch_size=}.")
        self.length = length
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.position = 0
        """Samples of this epoch that all ranks have taken."""

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches from the position on, to the end of the epoch."""
        rank, world_size = _ranks()
        order = Permutation(self.length, self.seed + self.epoch) if self.shuffle else range(self.length)
        share = self.batch_size * world_size
        for first in range(self.position, self.length - share + 1, share):
            begin = first + rank * self.batch_size
            yield [order[place] for place in range(begin, begin + self.batch_size)]

    def __len__(self) -> int:
        return (self.length - self.position) // (self.batch_size * _ranks()[1])

    def on_commit(self) -> None:
        """Count the batches of one step; `ElasticState.commit` calls it."""
        share = self.batch_size * _ranks()[1]
        self.position += share
        if self.position + share > self.length:
            self.epoch += 1
            self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


def _ranks() -> tuple[int, int]:
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
