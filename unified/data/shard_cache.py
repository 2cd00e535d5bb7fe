"""The shards of one worker in one dataset, as what reads them asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unified.data.known_shards import KnownShards
from unified.protocol.coordinator import DatasetStatus, ShardAssignment

if TYPE_CHECKING:
    from unified.data.registry import DatasetRegistry


class DatasetShards:
    """One worker's part of a dataset. Made by `DatasetRegistry.shard_source`. For one thread at a time.

    Attributes:
        format: of the dataset's files.
        life: in a job, which life of the worker this process is, from 0; else -1.
        is_elastic: the workers of its role are started again together.
        num_left: unfinished shards of the epoch, whoever has them, when `shards` was last answered by the coordinator.
    """

    def __init__(
        self,
        registry: DatasetRegistry,
        dataset_id: str,
        worker_rank: int | str | None,
        format: str,  # noqa: A002  as everywhere
        *,
        life: int = -1,
        is_elastic: bool = False,
    ) -> None:
        self.format = format
        self.life = life
        self.is_elastic = is_elastic
        self.num_left = 0
        self._registry = registry
        self._dataset_id = dataset_id
        self._worker_rank = worker_rank
        self._known = KnownShards()

    def shards(self, epoch: int) -> list[ShardAssignment]:
        """As `DatasetRegistry.get_assignment`: the first of them, without asking where `mark_done` has just told."""
        known = self._known.take(epoch)
        if known is not None:
            return known
        answer = self._registry.look_up(self._dataset_id, self._worker_rank, epoch, limit=self._known.at_once)
        self.num_left = answer.num_left
        return self._known.learn(epoch, answer)

    def mark_done(self, epoch: int, shard_ids: Sequence[int]) -> None:
        """As `DatasetRegistry.mark_done`."""
        answer = self._registry.report_done(self._dataset_id, self._worker_rank, epoch, shard_ids)
        self._known.finish(epoch, shard_ids, answer)

    def restore(self, position: Mapping[str, Any], *, is_first: bool = False) -> None:
        """As `DatasetRegistry.restore_position`."""
        self._known = KnownShards()
        self._registry.restore_position(self._dataset_id, position, self._worker_rank, is_first=is_first)

    def status(self) -> DatasetStatus:
        """As `DatasetRegistry.status`."""
        return self._registry.status(self._dataset_id)
