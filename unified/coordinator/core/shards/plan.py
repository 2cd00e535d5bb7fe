"""A dataset cut into shards: runs of samples, and the order in which an epoch reads them."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import shake_128

from unified.coordinator.core.shards.hash_ring import little_endian
from unified.errors import DatasetError, UsageError
from unified.values import Value

MAX_SHARDS = 1_000_000
"""Most shards of a dataset: to spread them takes half a second, in which the coordinator does nothing else."""


class ShardPlan(Value, frozen=True, kw_only=True):
    """The cut of a dataset: shard `i` is samples ``i * shard_size`` to ``(i + 1) * shard_size``, the last one shorter.

    Args:
        dataset_id: the dataset's name, on which the order depends.
        total_samples: 0 or more; a dataset of 0 has no shards.
        shard_size: samples of a shard, 1 or more.
        shuffle: read the shards of each epoch in another order.
        seed: seed of that order.

    Raises:
        UsageError: a number is out of its range, or there are more than a million shards.
    """

    dataset_id: str
    total_samples: int
    shard_size: int = 10_000
    shuffle: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.total_samples < 0:
            raise UsageError(f"Dataset {self.dataset_id!r} has {self.total_samples} samples: give 0 or more.")
        if self.shard_size < 1:
            raise UsageError(f"Dataset {self.dataset_id!r} has shards of {self.shard_size} samples: give 1 or more.")
        if self.num_shards > MAX_SHARDS:
            raise UsageError(
                f"Dataset {self.dataset_id!r} would be cut into {self.num_shards:,} shards, and {MAX_SHARDS:,} is the "
                f"limit: give a shard_size of {-(-self.total_samples // MAX_SHARDS):,} or more."
            )

    @property
    def num_shards(self) -> int:
        return -(-self.total_samples // self.shard_size)

    def bounds(self, shard_id: int) -> tuple[int, int]:
        """Return the first sample of a shard, and the one after its last; DatasetError: there is no such shard."""
        if not 0 <= shard_id < self.num_shards:
            raise DatasetError(
                f"Dataset {self.dataset_id!r} has no shard {shard_id}: its shards are 0 to {self.num_shards - 1}."
                if self.num_shards
                else f"Dataset {self.dataset_id!r} has no shard {shard_id}: it has no samples."
            )
        start = shard_id * self.shard_size
        return start, min(start + self.shard_size, self.total_samples)

    def order(self, epoch: int) -> Sequence[int]:
        """Return every shard once, in the order in which this epoch reads them.

        Without `shuffle` this is 0, 1, 2 …; with it, the order depends only on the seed, the dataset's name and the
        epoch, and is the same for any version of Python and any machine.
        """
        keys = self.sort_keys(epoch)
        return range(self.num_shards) if keys is None else sorted(range(self.num_shards), key=keys.__getitem__)

    def sort_keys(self, epoch: int) -> Sequence[int] | None:
        """Return a sort key for each shard (equal keys go by shard number); None: shards are read by number."""
        if not self.shuffle:
            return None
        # One digest of the wanted length gives a random number for each shard, at the price of a single hash. Numbers
        # of 30 bits are one digit of Python's integers: to sort them takes half as long.
        length = 4 * self.num_shards
        digest = int.from_bytes(shake_128(f"{self.seed}/{epoch}/{self.dataset_id}".encode()).digest(length), "little")
        low = int.from_bytes(b"\xff\xff\xff\x3f" * self.num_shards, "little")
        return little_endian("I", (digest & low).to_bytes(length, "little"))
