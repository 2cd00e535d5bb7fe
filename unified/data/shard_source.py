"""The shards of one worker in one dataset, as what reads them asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from unified.protocol.coordinator import ShardAssignment

if TYPE_CHECKING:
    from unified.data.registry import DatasetRegistry


class DatasetShards:
    """One worker's part of a dataset. Made by `DatasetRegistry.shard_source`.

    Attributes:
        format: of the dataset's files.
    """

    def __init__(self, registry: DatasetRegistry, dataset_id: str, worker_id: str, format: str) -> None:  # noqa: A002
        self.format = format
        self._registry = registry
        self._dataset_id = dataset_id
        self._worker_id = worker_id

    def shards(self, epoch: int) -> list[ShardAssignment]:
        """As `DatasetRegistry.get_assignment`."""
        return self._registry.get_assignment(self._dataset_id, self._worker_id, epoch)

    def mark_done(self, epoch: int, shard_ids: Sequence[int]) -> None:
        """As `DatasetRegistry.mark_done`."""
        self._registry.mark_done(self._dataset_id, shard_ids, epoch, self._worker_id)
