"""The shards of one worker in one dataset. A cache of the first shards saves one request per shard."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from unified.protocol.coordinator import DatasetStatus, DataShards, ShardAssignment, ShardsDone

AT_ONCE = 256
"""The number of shards that are requested together, so that an answer is small however many shards a worker has."""


@dataclass
class _CachedShards:
    epoch: int
    shards: list[ShardAssignment]
    revision: int
    is_all: bool
    """True if the worker has no other shards."""


class ShardCache:
    """The first of a worker's unfinished shards in an epoch.

    They are certain only at the moment of an answer of the coordinator: the answer with the shards, or the answer to a
    report of finished shards, if it still has the shards' revision. So each such answer permits one `take`.
    """

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self.at_once = at_once
        self._known: _CachedShards | None = None
        self._is_fresh = False

    def learn(self, epoch: int, answer: DataShards) -> list[ShardAssignment]:
        """Keep the coordinator's answer to a request for `at_once` shards; return the shards to read from now on."""
        is_all = len(answer.shards) < self.at_once
        self._known, self._is_fresh = _CachedShards(epoch, answer.shards, answer.revision, is_all), False
        return answer.shards

    def finish(self, epoch: int, shard_ids: Collection[int], answer: ShardsDone) -> None:
        """Note the answer to a report of finished shards, whether they counted or not."""
        known = self._known
        if known is None or (known.epoch, known.revision) != (epoch, answer.revision):
            self._known = None
            return
        gone = set(shard_ids)
        known.shards = [each for each in known.shards if each.shard_id not in gone]
        self._is_fresh = True

    def take(self, epoch: int) -> list[ShardAssignment] | None:
        """Return the shards to read from now on, of which the first is certain; None: ask the coordinator.

        It is asked when half of the shards are left, so that there is always enough to read ahead.
        """
        known, is_fresh, self._is_fresh = self._known, self._is_fresh, False
        if known is None or not is_fresh or known.epoch != epoch:
            return None
        return known.shards if known.is_all or len(known.shards) > self.at_once // 2 else None


class ShardLookup(Protocol):
    """The methods of a `DatasetRegistry` that a worker's part of a dataset uses."""

    def look_up(self, dataset_id: str, worker_rank: int | str | None, epoch: int, *, limit: int) -> DataShards: ...

    def report_done(
        self, dataset_id: str, worker_rank: int | str | None, epoch: int, shard_ids: Sequence[int]
    ) -> ShardsDone: ...

    def restore_position(
        self, dataset_id: str, position: Mapping[str, Any], worker_rank: int | str | None, *, is_first: bool
    ) -> None: ...

    def status(self, dataset_id: str) -> DatasetStatus: ...


@dataclass(eq=False)
class DatasetShards:
    """One worker's part of a dataset, made by `DatasetRegistry.shard_source`. For one thread at a time."""

    registry: ShardLookup
    dataset_id: str
    worker_rank: int | str | None
    format: str
    incarnation: int = -1
    """In a job, the incarnation of this process's worker, from 0; else -1."""
    is_elastic: bool = False
    """The workers of its role are started again together."""
    num_left: int = 0
    """Unfinished shards of the epoch, of all workers, by the coordinator's last answer to `shards`."""
    _known: ShardCache = field(default_factory=ShardCache)

    def shards(self, epoch: int) -> list[ShardAssignment]:
        """Return the first shards, like `DatasetRegistry.get_assignment`; without a request if an answer to `mark_done`
        has just confirmed them."""
        known = self._known.take(epoch)
        if known is not None:
            return known
        answer = self.registry.look_up(self.dataset_id, self.worker_rank, epoch, limit=self._known.at_once)
        self.num_left = answer.num_left
        return self._known.learn(epoch, answer)

    def mark_done(self, epoch: int, shard_ids: Sequence[int]) -> None:
        """Report shards, like `DatasetRegistry.mark_done`."""
        answer = self.registry.report_done(self.dataset_id, self.worker_rank, epoch, shard_ids)
        self._known.finish(epoch, shard_ids, answer)

    def restore(self, position: Mapping[str, Any], *, is_first: bool = False) -> None:
        """Go on from a position, like `DatasetRegistry.restore_position`."""
        self._known = ShardCache()
        self.registry.restore_position(self.dataset_id, position, self.worker_rank, is_first=is_first)

    def status(self) -> DatasetStatus:
        """Return values, workers and progress, like `DatasetRegistry.status`."""
        return self.registry.status(self.dataset_id)
