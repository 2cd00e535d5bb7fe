"""The ledger of a dataset: the shards of each worker, and the shards that were read; each shard of an epoch once.

Snapshots are records for a store. Their lists of shards are bytes, 4 for each number.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from unified.coordinator.core.shards.assignment import Owners
from unified.coordinator.core.shards.hash_ring import little_endian, tie_break
from unified.coordinator.core.shards.plan import ShardPlan
from unified.errors import DatasetError, InvariantError, nearest
from unified.values import Value


class OwnersSnapshot(Value, frozen=True, kw_only=True):
    """The unfinished shards of one epoch and their owners, as a record."""

    epoch: int
    """Number of the epoch; -1: the lists with which every epoch begins."""
    lists: list[bytes]
    """Shards of each of the ledger's workers, in the order of the workers and of reading."""
    orphans: bytes = b""
    """Shards without an owner, if there are no workers."""
    is_moved: bool = False
    """Workers came or went since the epoch was opened."""


class LedgerSnapshot(Value, frozen=True, kw_only=True):
    plan: ShardPlan
    workers: list[str]
    epoch: int
    revision: int
    complete: list[int]
    """Epochs from the current one on in which everything is done."""
    epochs: list[OwnersSnapshot]
    initial: OwnersSnapshot | None = None
    """The lists with which each epoch begins without `shuffle`."""


def take_snapshot(owners: Owners, workers: Iterable[str], epoch: int = -1) -> OwnersSnapshot:
    return OwnersSnapshot(
        epoch=epoch,
        lists=[_packed(owners.lists[name][::-1]) for name in workers],
        orphans=_packed(owners.orphans),
        is_moved=owners.is_moved,
    )


def restore(owners: Owners, snapshot: OwnersSnapshot, workers: Sequence[str]) -> None:
    """Fill empty `owners` from a snapshot; InvariantError: it has other shards or workers."""
    if len(snapshot.lists) != len(workers) or any(len(each) % 4 for each in [*snapshot.lists, snapshot.orphans]):
        raise InvariantError("A snapshot of a dataset's shards is not whole: the store is damaged.")
    owners.lists = {
        name: little_endian("I", packed)[::-1] for name, packed in zip(workers, snapshot.lists, strict=True)
    }
    owners.orphans = little_endian("I", snapshot.orphans)
    owners.is_moved = snapshot.is_moved
    if broken := owners.broken_rules():
        raise InvariantError(f"A snapshot of a dataset's shards is not valid: {'; '.join(broken)}.")


def _packed(shard_ids: array[int]) -> bytes:
    return little_endian("I", shard_ids.tobytes()).tobytes()


NUM_IDLE = 4
"""Most epochs that were asked for and have no progress; beyond it, the first is forgotten."""


class _EpochProgress:
    """Progress of one epoch that somebody asked for."""

    def __init__(self, owners: Owners, num_shards: int) -> None:
        self.owners = owners
        self.is_done = bytearray(num_shards)
        self.num_done = 0

    def finish(self, shard_ids: Iterable[int]) -> None:
        for shard_id in shard_ids:
            self.is_done[shard_id] = 1
            self.num_done += 1


class Ledger:
    """One dataset: its workers, and the progress of its epochs.

    A worker reads the list of `shards_of` from the beginning, and reports each shard with `mark_done` before it begins
    the next. The worker is reading the first shard of its list: this shard goes to nobody else while the worker is
    there. So no shard is read by two workers, unless the first one left without a report.

    With `shuffle` each epoch is spread over the workers anew. Without it each worker has the same shards in each epoch,
    and may still have them at hand.
    """

    def __init__(self, plan: ShardPlan, workers: Iterable[str] = ()) -> None:
        self.plan = plan
        self.epoch = 0
        """The current epoch. Earlier epochs are past: their shards are not handed out again. Later epochs are open,
        too, because workers do not reach the end of an epoch together."""
        self.revision = 0
        """Number that grows when a worker's shards may have changed, except by its own reports."""
        self._tie_breaks: dict[str, bytes] = {}
        self._tie_breaks = self._ticketed(workers)
        self._epochs: dict[int, _EpochProgress] = {}
        self._complete: set[int] = set()
        """Open epochs in which everything is done; nothing else is kept of them."""
        self._initial: Owners | None = None
        """The lists with which an epoch begins without `shuffle`."""
        if not plan.shuffle:
            self._initial = Owners(f"0/{plan.dataset_id}", plan.num_shards, None, is_read=False)
            self._initial.begin(self._tie_breaks)

    @property
    def workers(self) -> Sequence[str]:
        """Owners of the shards, in the order of their names."""
        return list(self._tie_breaks)

    @property
    def open_epochs(self) -> Sequence[int]:
        """Epochs with progress, or asked for recently, in order; complete ones are left out."""
        return sorted(self._epochs)

    def is_open(self, epoch: int) -> bool:
        """Return True if somebody has asked for an epoch's shards, and may be reading the first; or if all are done."""
        return epoch in self._epochs or epoch in self._complete

    def set_workers(self, workers: Iterable[str]) -> bool:
        """Spread the unfinished shards over these workers; return True if anything changed.

        Shards of workers that left go to the workers with fewest shards. A worker that joined is filled up to the mean:
        the workers with most shards give it the shards that they would read last. Nothing else moves. The order of
        `workers` does not matter.
        """
        tie_breaks = self._ticketed(workers)
        if tie_breaks == self._tie_breaks:
            return False
        self._tie_breaks = tie_breaks
        for each in self._epochs.values():
            each.owners.change(self._tie_breaks)
        if self._initial is not None:
            self._initial.change(self._tie_breaks)
        self.revision += 1
        return True

    def shards_of(self, worker: str, epoch: int, limit: int = 0) -> list[int]:
        """Return the unfinished shards of a worker, in the order of reading.

        With `limit` return only the first ones, in a time that does not depend on their total; 0: all. DatasetError:
        the epoch is past or below 0, or the dataset is not spread over the worker.
        """
        if worker not in self._tie_breaks:
            raise DatasetError(
                f"Worker {worker!r} has no part in dataset {self.plan.dataset_id!r}, which is spread over "
                f"{len(self._tie_breaks)} workers; add it to them first.{nearest(worker, self._tie_breaks)}"
            )
        self._check_epoch(epoch)
        if epoch < self.epoch:
            raise DatasetError(
                f"Epoch {epoch} of dataset {self.plan.dataset_id!r} is past: ask for {self.epoch}, the current one, "
                f"or a later one."
            )
        if epoch in self._complete:
            return []
        return self._open(epoch).owners.shards_of(worker, limit)

    def mark_done(self, epoch: int, worker: str, shard_ids: Iterable[int]) -> list[int]:
        """Count shards that a worker has read to the end; return the counted ones, which were its own until then.

        Shards reported twice, or too late (the epoch is past, the shard was given to another), are left out.
        DatasetError: there is no such shard, or the epoch is below 0.
        """
        self._check_epoch(epoch)
        wanted = list(dict.fromkeys(shard_ids))
        for shard_id in wanted:
            self.plan.bounds(shard_id)
        if epoch < self.epoch or epoch in self._complete or worker not in self._tie_breaks:
            return []
        state = self._open(epoch)
        owned = state.owners.lists[worker]
        counted = [shard_id for shard_id in wanted if not state.is_done[shard_id]]
        if len(counted) != 1 or not owned or counted[0] != owned[-1]:  # not the report of a worker that reads in order
            owned_ids = set(owned)
            counted = [shard_id for shard_id in counted if shard_id in owned_ids]
        if counted:
            state.owners.remove(worker, counted)
            state.finish(counted)
            self._close_if_complete(epoch)
        return counted

    def redo(self, epoch: int, shard_ids: Iterable[int]) -> None:
        """Count shards that `mark_done` has counted since the snapshot that this ledger was restored from.

        It searches all unfinished shards: give all shards of an epoch together. DatasetError: there is no such shard.
        """
        for shard_id in (wanted := set(shard_ids)):
            self.plan.bounds(shard_id)
        if epoch < self.epoch or epoch in self._complete:
            return
        state = self._open(epoch)
        wanted = {shard_id for shard_id in wanted if not state.is_done[shard_id]}
        state.owners.discard(wanted)
        state.finish(wanted)
        self._close_if_complete(epoch)

    def advance(self, epoch: int) -> bool:
        """Make `epoch` the current one, and give up earlier unfinished shards. Return False if it is current or past.

        DatasetError: the epoch is below 0.
        """
        self._check_epoch(epoch)
        if epoch <= self.epoch:
            return False
        self.epoch = epoch
        self._epochs = {each: state for each, state in self._epochs.items() if each >= epoch}
        self._complete = {each for each in self._complete if each >= epoch}
        self.revision += 1
        return True

    def rewind(self, epoch: int, done: Iterable[int]) -> None:
        """Go to exactly this position: `epoch` is the current one, only these of its shards are done, and all other
        epochs are forgotten. DatasetError: there is no such shard, or the epoch is below 0.
        """
        self._check_epoch(epoch)
        for shard_id in (wanted := set(done)):
            self.plan.bounds(shard_id)
        self.epoch = epoch
        self._epochs, self._complete = {}, set()
        self.redo(epoch, wanted)
        self.revision += 1

    def num_done(self, epoch: int) -> int:
        """Return the number of an epoch's shards that were read to the end; 0 for a past epoch, which is forgotten."""
        if epoch in self._complete:
            return self.plan.num_shards
        return self._epochs[epoch].num_done if epoch in self._epochs else 0

    def snapshot(self) -> LedgerSnapshot:
        """Return a snapshot. A store needs a new one when `revision` has changed, and later shards for `redo`."""
        return LedgerSnapshot(
            plan=self.plan,
            workers=list(self._tie_breaks),
            epoch=self.epoch,
            revision=self.revision,
            complete=sorted(self._complete),
            epochs=[
                take_snapshot(state.owners, self._tie_breaks, epoch) for epoch, state in sorted(self._epochs.items())
            ],
            initial=None if self._initial is None else take_snapshot(self._initial, self._tie_breaks),
        )

    @classmethod
    def restore(cls, snapshot: LedgerSnapshot) -> Ledger:
        """Return a ledger that goes on from a snapshot; InvariantError: it is damaged."""
        ledger = cls(snapshot.plan)
        ledger._tie_breaks = {name: tie_break(snapshot.plan.dataset_id, name) for name in snapshot.workers}
        ledger.epoch = snapshot.epoch
        ledger.revision = snapshot.revision
        ledger._complete = set(snapshot.complete)
        num_shards = snapshot.plan.num_shards
        if snapshot.initial is not None and ledger._initial is not None:
            restore(ledger._initial, snapshot.initial, snapshot.workers)
        for each in snapshot.epochs:
            state = _EpochProgress(ledger._new_owners(each.epoch), num_shards)
            restore(state.owners, each, snapshot.workers)
            unfinished = set(state.owners.all_shards())
            state.finish(shard_id for shard_id in range(num_shards) if shard_id not in unfinished)
            ledger._epochs[each.epoch] = state
        if broken := ledger.check():
            name = snapshot.plan.dataset_id
            raise InvariantError(f"A snapshot of dataset {name!r} is not valid: {'; '.join(broken)}.")
        return ledger

    def check(self) -> list[str]:
        """Return the rules of a ledger that this one breaks; none, unless there is a defect."""
        kept = {*self._epochs, *self._complete}
        broken = [f"epoch {each} is past but still kept" for each in kept if each < self.epoch]
        if list(self._tie_breaks) != sorted(self._tie_breaks):
            broken.append("workers are not in order")
        every = [(f"epoch {epoch}", state.owners, state.is_done) for epoch, state in self._epochs.items()]
        if self._initial is not None:
            every.append(("every epoch", self._initial, bytearray(self.plan.num_shards)))
        for what, owners, is_done in every:
            broken += [f"{what}: {rule}" for rule in owners.broken_rules()]
            if owners.lists.keys() != self._tie_breaks.keys():
                broken.append(f"{what}: lists are not of the workers")
            if sorted(owners.all_shards()) != [shard_id for shard_id, done in enumerate(is_done) if not done]:
                broken.append(f"{what}: the lists do not match the unfinished shards")
        return broken

    def _check_epoch(self, epoch: int) -> None:
        if epoch < 0:
            raise DatasetError(f"Dataset {self.plan.dataset_id!r} has no epoch {epoch}: they count from 0.")

    def _open(self, epoch: int) -> _EpochProgress:
        state = self._epochs.get(epoch)
        if state is None:
            state = _EpochProgress(self._new_owners(epoch), self.plan.num_shards)
            if self._initial is not None:
                state.owners.copy_from(self._initial)
            else:
                state.owners.begin(self._tie_breaks)
            self._epochs[epoch] = state
            self._forget_idle(epoch)
        return state

    def _ticketed(self, workers: Iterable[str]) -> dict[str, bytes]:
        known = self._tie_breaks
        return {name: known.get(name) or tie_break(self.plan.dataset_id, name) for name in sorted(set(workers))}

    def _new_owners(self, epoch: int) -> Owners:
        salt = f"{epoch if self.plan.shuffle else 0}/{self.plan.dataset_id}"
        return Owners(salt, self.plan.num_shards, self.plan.sort_keys(epoch), is_read=True)

    def _forget_idle(self, asked_for: int) -> None:
        """Forget the first of too many epochs without progress, so that they do not fill the memory."""
        idle = [each for each in self.open_epochs if not self._epochs[each].num_done and each != asked_for]
        for epoch in idle[: max(len(idle) - NUM_IDLE, 0)]:
            if self._epochs.pop(epoch).owners.is_moved:  # a later request for it may get other shards
                self.revision += 1

    def _close_if_complete(self, epoch: int) -> None:
        if self._epochs[epoch].num_done == self.plan.num_shards:
            del self._epochs[epoch]
            self._complete.add(epoch)
