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
    """The shards of an epoch that one reader has read, and how far it is in those that it has begun.

    It is in the midst of one shard at most, unless it was interrupted and given others to read first.

    Attributes:
        epoch: from 0.
        shard: the one that is being read; None: none is.
        offset: samples of it that were handed out.
    """

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self.shard: int | None = None
        self.offset = 0
        self._done: dict[int, None] = {}
        self._begun: dict[int, int] = {}
        """Offsets in those that were begun and then left."""

    @property
    def done(self) -> list[int]:
        """Shards that were read to the end, in that order."""
        return list(self._done)

    def plan(self, assignments: Iterable[ShardAssignment]) -> list[Reading]:
        """Return what is to be read of these shards, in their order: the first is this reader's for sure, the others
        may go to another one until they are first."""
        begun = self._offsets()
        left = [each for each in assignments if each.shard_id not in self._done]
        return [Reading(each, begun.get(each.shard_id, 0)) for each in left]

    def already_done(self, assignments: Iterable[ShardAssignment]) -> list[int]:
        """Return those of these shards that were read to the end, of which whoever assigns them has not heard."""
        return [each.shard_id for each in assignments if each.shard_id in self._done]

    def begin(self, reading: Reading) -> None:
        """Begin a shard: its samples are handed out from now on."""
        self._begun = self._offsets()
        self.shard, self.offset = reading.assignment.shard_id, reading.skip
        self._begun.pop(self.shard, None)

    def finish(self) -> int:
        """Finish the shard that was begun: it has been read to the end; return it."""
        if self.shard is None:
            raise UsageError("no shard was begun, and so none was finished.")
        finished = self.shard
        self._done[finished] = None
        self.shard, self.offset = None, 0
        return finished

    def go_to(self, epoch: int) -> None:
        """Go to the begin of an epoch; if it is the present one, nothing changes."""
        if epoch != self.epoch:
            self.epoch, self._done, self.shard, self.offset, self._begun = epoch, {}, None, 0, {}

    def state(self) -> dict[str, Any]:
        """Return what `load` takes: plain values, which JSON can say too."""
        return {"epoch": self.epoch, "done": self.done, "begun": [[*each] for each in self._offsets().items()]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the position of another one."""
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
    """Merge the positions of all who read a dataset together into one, which each member of any other world may load.

    Whoever loads it passes over what any of them had read, wherever that was; so training goes on from a checkpoint
    with more ranks or fewer. It names no dataset, so it can be loaded into the same one under another name.

    Args:
        states: what `ShardedDataset.state_dict` gave each of them, at the same step.

    Returns:
        What `ShardedDataset.load_state_dict` takes; plain values. Where some had begun the next epoch, theirs: the
        little that others had still to read of the one before is given up.

    Raises:
        UsageError: one is no such state, or there is none.
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
    """Make the request that a dataset goes on from a position. Its number says whether it is new, or said again.

    Args:
        position: what `ShardedDataset.state_dict` or `merge_positions` gave.
        reader: the worker that asks: `space`, `worker_id`, `session`, `incarnation`.
        world: ids of all who read from now on; empty if they are not known.
        is_first: it counts only if this process has restored none of this dataset for that worker yet.
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
    """Renew the process's id: a worker is a fork of a process that may have imported this already."""
    global _process
    _process = uuid.uuid4().hex


os.register_at_fork(after_in_child=_renew_after_fork)
