"""Order of the rows of a run: the sampler of each rank, a position in it, and the number of steps from there.

A resumed run sees the same rows as a run without a break. The order of an epoch depends only on the seed and the epoch.
A position counts the rows that all ranks have seen, so that the number of ranks may change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch.utils.data import DistributedSampler

from unified.core.permutation import Permutation
from unified.errors import UsageError


class Position(NamedTuple):
    """Rows seen so far."""

    epoch: int = 0
    row: int = 0
    """Rows of the epoch that all ranks together have seen."""


class TrainingPlan(NamedTuple):
    """Sizes that the number of steps depends on."""

    num_rows: int
    world_size: int
    batch_size: int
    """Rows of one rank in one forward pass."""
    accumulation: int
    """Forward passes of a step; the last step of an epoch may have fewer."""
    num_epochs: float
    max_steps: int
    """Overrides `num_epochs` if it is above 0."""

    def rows_of(self, epoch: int) -> int:
        """Return the number of rows of an epoch: all, or a part of them in the last epoch."""
        if self.max_steps > 0:
            return self.num_rows
        share = min(1.0, max(0.0, self.num_epochs - epoch))
        return math.ceil(self.num_rows * share - 1e-9)

    def total_steps(self, step: int, position: Position) -> int:
        """Return the number of steps of the whole run, which has done `step` steps at `position`."""
        if self.max_steps > 0:
            return self.max_steps
        steps = step + self._steps_of(max(0, self.rows_of(position.epoch) - position.row))
        num_whole = max(0, math.floor(self.num_epochs) - position.epoch - 1)
        last = max(position.epoch + 1, math.floor(self.num_epochs))
        return steps + num_whole * self._steps_of(self.num_rows) + self._steps_of(self.rows_of(last))

    def after(self, position: Position, num_passes: int) -> Position:
        """Return the position after `num_passes` forward passes of every rank."""
        row = position.row + num_passes * self.batch_size * self.world_size
        return Position(position.epoch, row) if row < self.rows_of(position.epoch) else Position(position.epoch + 1)

    def _steps_of(self, rows: int) -> int:
        passes = math.ceil(math.ceil(rows / self.world_size) / self.batch_size)
        return math.ceil(passes / self.accumulation)


def check_rows(step: int, before: int | None, now: int) -> None:
    """Raise UsageError if the run of a checkpoint had another number of rows; `before` is None: unknown."""
    if before not in (None, now):
        raise UsageError(
            f"checkpoint {step} is of a run on {before} rows, and there are {now} now: resume it with the same dataset "
            "and eval_fraction, or give the new run another run_id."
        )


class ResumableSampler(DistributedSampler[int]):
    """The rows of one rank in an epoch, from a position on. Every rank gets the same number of rows: at the end of
    an epoch, some rows come twice.
    """

    def __init__(self, num_rows: int, *, rank: int, world_size: int, seed: int) -> None:
        super().__init__(range(num_rows), num_replicas=world_size, rank=rank, shuffle=True, seed=seed)  # type: ignore[arg-type]
        self._num_rows = num_rows
        self._first, self._last = 0, num_rows

    def set_position(self, position: Position, num_rows: int) -> None:
        """Begin at `position`, and end after `num_rows` rows of the epoch."""
        self.set_epoch(position.epoch)
        self._first, self._last = min(position.row, num_rows), num_rows

    def __len__(self) -> int:
        return math.ceil((self._last - self._first) / self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        order = Permutation(self._num_rows, self.seed + self.epoch)
        for index in range(len(self)):
            place = self._first + index * self.num_replicas + self.rank
            yield order[place if place < self._last else (place - self._last) % self._last]
