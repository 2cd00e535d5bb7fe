"""What a worker knows of its own shards without asking again. No I/O here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from unified.protocol.coordinator import DataShards, ShardAssignment, ShardsDone

AT_ONCE = 256
"""Shards that are asked for together, so that an answer is small whatever a worker has."""


@dataclass
class _Known:
    epoch: int
    shards: list[ShardAssignment]
    revision: int
    is_all: bool
    """The worker has no more than these."""


class KnownShards:
    """The first of a worker's unfinished shards in an epoch.

    They hold at the moment in which the coordinator said so: in its answer with the shards, or in one to a report of
    some that are done, if its revision is still that of the shards. So each such word is good for one `take`.

    Args:
        at_once: shards that are asked for together.
    """

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self.at_once = at_once
        self._known: _Known | None = None
        self._is_fresh = False

    def learn(self, epoch: int, answer: DataShards) -> list[ShardAssignment]:
        """What the coordinator answered to who asked for `at_once`: what is to be read from now on."""
        is_all = len(answer.shards) < self.at_once
        self._known, self._is_fresh = _Known(epoch, answer.shards, answer.revision, is_all), False
        return answer.shards

    def finish(self, epoch: int, shard_ids: Collection[int], answer: ShardsDone) -> None:
        """These were reported as done, whether they counted or not, and that was the answer."""
        known = self._known
        if known is None or (known.epoch, known.revision) != (epoch, answer.revision):
            self._known = None
            return
        gone = set(shard_ids)
        known.shards = [each for each in known.shards if each.shard_id not in gone]
        self._is_fresh = True

    def take(self, epoch: int) -> list[ShardAssignment] | None:
        """What is to be read from now on, the first of it for sure; None: ask for it.

        It is asked for when half of it is left, so that there is always enough to be read ahead.
        """
        known, is_fresh, self._is_fresh = self._known, self._is_fresh, False
        if known is None or not is_fresh or known.epoch != epoch:
            return None
        return known.shards if known.is_all or len(known.shards) > self.at_once // 2 else None
