"""The shards of one worker in one dataset, as what reads them asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unified.protocol.coordinator import DatasetStatus, ShardAssignment

if TYPE_CHECKING:
    from unified.data.registry import DatasetRegistry


class DatasetShards:
    """One worker's part of a dataset. Made by `DatasetRegistry.shard_source`.

    Attributes:
        format: of the dataset's files.
        life: in a job, which life of the worker this process is, from 0; else -1.
        is_elastic: the workers of its role are started again together.
    """

    def __init__(
        self,
        registry: DatasetRegistry,
        dataset_id: str,
        worker_id: str,
        format: str,  # noqa: A002  as everywhere
        *,
        life: int = -1,
        is_elastic: bool = False,
    ) -> None:
        self.format = format
        self.life = life
        self.is_elastic = is_elastic
        self._registry = registry
        self._dataset_id = dataset_id
        self._worker_id = worker_id

    def shards(self, epoch: int) -> list[ShardAssignment]:
        """As `DatasetRegistry.get_assignment`."""
        return self._registry.get_assignment(self._dataset_id, self._worker_id, epoch)

    def mark_done(self, epoch: int, shard_ids: Sequence[int]) -> None:
        """As `DatasetRegistry.mark_done`."""
        self._registry.mark_done(self._dataset_id, shard_ids, epoch, self._worker_id)

    def restore(self, position: Mapping[str, Any], *, is_first: bool = False) -> None:
        """As `DatasetRegistry.restore_position`."""
        self._registry.restore_position(self._dataset_id, position, self._worker_id, is_first=is_first)

    def status(self) -> DatasetStatus:
        """As `DatasetRegistry.status`."""
        return self._registry.status(self._dataset_id)
