"""The position of a reader in an epoch, and requests to go on from one. No file and no thread here."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from unified.errors import UsageError
from unified.protocol.coordinator import RestorePosition, ShardAssignment

_process = uuid.uuid4().hex
_numbers = itertools.count(1)


class Reading(NamedTuple):
    """A shard to be read, without its first `skip` samples."""

    assignment: ShardAssignment
    skip: int = 0


class ReadingPosition:
    """The shards of an epoch that one reader has read, and its offsets in the shards that it has begun.

    Only one shard is begun, unless the reader was interrupted and given other shards to read first.

    Attributes:
        epoch: from 0.
        shard: the shard that is being read; None: none.
        offset: samples of this shard that were handed out.
    """

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self.shard: int | None = None
        self.offset = 0
        self._done: dict[int, None] = {}
        self._begun: dict[int, int] = {}
        """Offsets in shards that were begun and then left."""

    @property
    def done(self) -> list[int]:
        """Shards that were read to the end, in the order of reading."""
        return list(self._done)

    def plan(self, assignments: Iterable[ShardAssignment]) -> list[Reading]:
        """Return the unread shards in their order, without the samples that were read. The first shard is certain; the
        others may still go to another reader."""
        begun = self._offsets()
        left = [each for each in assignments if each.shard_id not in self._done]
        return [Reading(each, begun.get(each.shard_id, 0)) for each in left]

    def already_done(self, assignments: Iterable[ShardAssignment]) -> list[int]:
        """Return the shards that were read to the end but are still assigned: their report was not heard."""
        return [each.shard_id for each in assignments if each.shard_id in self._done]

    def begin(self, reading: Reading) -> None:
        """Begin a shard: its samples are handed out from now on."""
        self._begun = self._offsets()
        self.shard, self.offset = reading.assignment.shard_id, reading.skip
        self._begun.pop(self.shard, None)

    def finish(self) -> int:
        """Note that the begun shard was read to the end; return it."""
        if self.shard is None:
            raise UsageError("finish() without begin(): no shard is being read.")
        finished = self.shard
        self._done[finished] = None
        self.shard, self.offset = None, 0
        return finished

    def go_to(self, epoch: int) -> None:
        """Go to the begin of an epoch; if it is the current one, nothing changes."""
        if epoch != self.epoch:
            self.epoch, self._done, self.shard, self.offset, self._begun = epoch, {}, None, 0, {}

    def state(self) -> dict[str, Any]:
        """Return a state for `load`: plain values that JSON has, too."""
        return {"epoch": self.epoch, "done": self.done, "begun": [[*each] for each in self._offsets().items()]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state of another position."""
        try:
            epoch, done = int(state["epoch"]), dict.fromkeys(int(each) for each in state["done"])
            begun = {int(shard_id): int(offset) for shard_id, offset in state["begun"]}
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"this is not what state_dict() gave: {state!r} ({error!r}).") from error
        self.epoch, self._done, self.shard, self.offset, self._begun = epoch, done, None, 0, begun

    def _offsets(self) -> dict[int, int]:
        """Return the offsets in all shards that were begun and not finished."""
        return self._begun if self.shard is None else {**self._begun, self.shard: self.offset}


def merge_positions(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the positions of all readers of a dataset into one, which each member of any other world may load.

    A reader that loads it skips everything that any of them had read. So training goes on from a checkpoint with more
    ranks or fewer. The position names no dataset, so it can be loaded into the same dataset under another name.

    Args:
        states: the results of `ShardedDataset.state_dict` of all readers, at the same step.

    Returns:
        A state for `ShardedDataset.load_state_dict`; plain values. If some readers had begun the next epoch, it is a
        position in that epoch: what others had still to read of the epoch before is given up.

    Raises:
        UsageError: `states` is empty, or one of them is not such a state.
    """
    if not states:
        raise UsageError("there are no positions to merge: give what state_dict() of each rank's dataset gave.")
    positions = [ReadingPosition() for _ in states]
    for position, state in zip(positions, states, strict=True):
        position.load(state)
    epoch = max(position.epoch for position in positions)
    ahead = [position.state() for position in positions if position.epoch == epoch]
    done = sorted({shard_id for state in ahead for shard_id in state["done"]})
    begun: dict[int, int] = {}
    for state in ahead:
        for shard_id, offset in state["begun"]:
            begun[shard_id] = max(offset, begun.get(shard_id, 0))
    return {"epoch": epoch, "done": done, "begun": [[*each] for each in sorted(begun.items())]}


def restore_request(
    dataset_id: str, position: Mapping[str, Any], reader: Mapping[str, Any], *, world: list[str], is_first: bool
) -> RestorePosition:
    """Make the request to go on from a position. Its number tells a new request from a repeated one.

    Args:
        position: the result of `ShardedDataset.state_dict` or `merge_positions`.
        reader: the worker that asks: `space`, `worker_id`, `session`, `incarnation`.
        world: ids of all workers that read from now on; empty if they are not known.
        is_first: the request counts only if this process has restored no position of this dataset for that worker yet.
    """
    where = ReadingPosition()
    where.load(position)
    return RestorePosition(
        dataset_id=dataset_id,
        epoch=where.epoch,
        done=sorted(set(where.done)),
        begun=sorted((shard_id, offset) for shard_id, offset in where.state()["begun"]),
        world=world if reader["worker_id"] in world else [],
        process=_process,
        number=0 if is_first else next(_numbers),
        **reader,
    )


def _renew_after_fork() -> None:
    """Renew the process's id: a worker is a fork of a process that may have imported this module already."""
    global _process
    _process = uuid.uuid4().hex


os.register_at_fork(after_in_child=_renew_after_fork)
