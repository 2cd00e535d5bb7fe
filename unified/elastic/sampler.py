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
    need. If it was read to its end, but commits cover only a part of it, the next iteration raises `UsageError`.

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
        self._read: int | None = None  # end of the samples that were read; None if another process reads them
        self._is_read_to_end = False

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches from the position on, to the end of the epoch."""
        rank, world_size = _ranks()
        share = self.batch_size * world_size
        if share > self.length:
            raise UsageError(f"ElasticSampler has {self.length} samples, but its ranks take {share}: lower batch_size.")
        self._end_epoch_if_done(share)
        if self._is_read_to_end:
            raise UsageError(
                f"all {self.length // share} batches of epoch {self.epoch} were read, but commits cover "
                f"{self.length // share - len(self)}: call state.commit(batches=K) after each step of K batches, or "
                "sampler.rewind() to read the others again."
            )
        epoch = self.epoch
        order = Permutation(self.length, self.seed + epoch) if self.shuffle else range(self.length)
        for first in range(self.position, self.length - share + 1, share):
            self._read = max(self._read or 0, first + share)
            begin = first + rank * self.batch_size
            yield [order[place] for place in range(begin, begin + self.batch_size)]
        self._is_read_to_end = self.epoch == epoch

    def __len__(self) -> int:
        return (self.length - self.position) // (self.batch_size * _ranks()[1])

    def on_commit(self, batches: int = 1) -> None:
        """Count the batches of one step, at most those left in the epoch; `ElasticState.commit` calls it."""
        share = self.batch_size * _ranks()[1]
        self._end_epoch_if_done(share)
        position = self.position + share * min(batches, len(self))
        if batches < 0 or (self._read is not None and position > self._read):
            num_read = ((self._read or self.position) - self.position) // share
            raise UsageError(
                f"state.commit(batches={batches}) was called, but {num_read} batches were read since the last commit: "
                "give it the number that the step has trained, or 0 for none."
            )
        self.position = position
        self._end_epoch_if_done(share)

    def rewind(self) -> None:
        """Let the next iteration begin after the last commit, also if this epoch was read to its end."""
        self._read, self._is_read_to_end = None, False

    def _end_epoch_if_done(self, share: int) -> None:
        """Go to the next epoch if less is left than all ranks need; a round of more ranks needs more."""
        if self.position + share > self.length:
            self.epoch, self.position = self.epoch + 1, 0
            self._read, self._is_read_to_end = self._read and 0, False

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
        self.rewind()


def _ranks() -> tuple[int, int]:
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
