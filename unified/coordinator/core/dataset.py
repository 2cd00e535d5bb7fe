"""One dataset of a space: its files, its progress, and the records that persist them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import msgspec

from unified.coordinator.core.file_layout import FileLayout
from unified.coordinator.core.records import LoadedPosition, row_key
from unified.coordinator.core.shards.assignment import spread_files
from unified.coordinator.core.shards.ledger import Ledger, LedgerSnapshot
from unified.coordinator.core.shards.plan import ShardPlan
from unified.errors import UsageError
from unified.protocol.coordinator import DatasetStatus, DataShards, RegisterDataset, ShardAssignment

MAX_MARKS = 1000
"""Marks that are persisted one by one before all progress is persisted as a whole."""
MAX_FILE_LISTS = 4
"""Most pairs of an epoch and a world size for which the files of each rank are remembered."""
_COMPARED = ("path", "format", "total_samples", "shard_size", "shuffle", "seed", "metadata")


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the progress: shards that were read since the whole progress was persisted."""

    space: str
    dataset_id: str
    number: int
    """Number of the mark since then, from 1."""
    epoch: int
    shard_ids: list[int]


class DatasetProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The whole progress of a dataset, persisted separately from its registration."""

    space: str
    dataset_id: str
    space_revision: int
    ledger: LedgerSnapshot


def mark_key(space: str, dataset_id: str, number: int) -> str:
    return f"{row_key(space, dataset_id)}/{number}"


class DatasetState:
    """A registered dataset, and how far it has been read."""

    def __init__(self, info: RegisterDataset, ledger: Ledger) -> None:
        self.info = info
        self.ledger = ledger
        self.plan = ledger.plan
        self.num_marks = 0
        self.ready: dict[tuple[str, int], DataShards] = {}
        """Answers with all shards, by worker and epoch: for one revision of the space, until one of them is done."""
        self.position: LoadedPosition | None = None
        """The position to which the dataset was last set back; None: it never was."""
        self.marked: dict[str, int] = {}
        """Incarnation of each worker of a job that has read since then. Not persisted."""
        self.awaited: set[str] = set()
        """Members that others have named, and that were not heard yet."""
        self._files_by_rank: dict[tuple[int, int], list[list[int]]] = {}
        self._layout = FileLayout(file.num_samples for file in info.files)

    @classmethod
    def begin(cls, info: RegisterDataset) -> Self:
        """Return an unread dataset; UsageError: the registration is not valid."""
        if not info.dataset_id or not info.path:
            raise UsageError("a dataset needs a dataset_id and a path that are not empty.")
        plan = ShardPlan(
            dataset_id=info.dataset_id,
            total_samples=info.total_samples,
            shard_size=info.shard_size,
            shuffle=info.shuffle,
            seed=info.seed,
        )
        if any(file.num_samples < 0 for file in info.files):
            raise UsageError(f"dataset {info.dataset_id!r} has a file with less than 0 samples.")
        dataset = cls(info, Ledger(plan))
        if info.files and dataset._layout.total_samples != info.total_samples:
            raise UsageError(
                f"dataset {info.dataset_id!r} is said to have {info.total_samples} samples, and its "
                f"{len(info.files)} files have {dataset._layout.total_samples}: give what they have, or leave it out."
            )
        return dataset

    def differences(self, info: RegisterDataset) -> list[str]:
        """Return the differences of another registration in words. Files are compared if both have them."""
        pairs = [(name, getattr(self.info, name), getattr(info, name)) for name in _COMPARED]
        found = [f"{name} is {mine!r}, not {other!r}" for name, mine, other in pairs if mine != other]
        if self.info.files and info.files and self.info.files != info.files:
            found.append(f"its {len(self.info.files)} files differ from the {len(info.files)} given")
        return found

    def shards(self, epoch: int, shard_ids: list[int], revision: int) -> DataShards:
        """Return the answer to a worker that has these shards."""
        shards = [self._assignment(shard_id) for shard_id in shard_ids]
        num_left = self.plan.num_shards - self.ledger.num_done(epoch)
        return DataShards(shards=shards, revision=revision, num_left=num_left)

    def files_by_rank(self, epoch: int, world_size: int) -> list[list[int]]:
        """Return the numbers of each rank's files in an epoch, by `spread_files`, and keep them for the next call."""
        key = (epoch if self.info.shuffle else 0, world_size)
        found = self._files_by_rank.get(key)
        if found is None:
            if len(self._files_by_rank) >= MAX_FILE_LISTS:
                self._files_by_rank.clear()
            info = self.info
            plan = ShardPlan(
                dataset_id=info.dataset_id,
                total_samples=max(len(info.files), 1),
                shard_size=1,
                shuffle=info.shuffle,
                seed=info.seed,
            )
            sizes = [file.num_samples for file in info.files] or [info.total_samples]
            found = self._files_by_rank[key] = spread_files(sizes, world_size, plan.order(epoch))
        return found

    def mark(self, space: str, epoch: int, shard_ids: list[int]) -> Mark:
        """Return a mark that persists these shards as read."""
        self.num_marks += 1
        dataset_id = self.info.dataset_id
        return Mark(space=space, dataset_id=dataset_id, number=self.num_marks, epoch=epoch, shard_ids=shard_ids)

    def progress(self, space: str, revision: int) -> DatasetProgress:
        dataset_id, ledger = self.info.dataset_id, self.ledger.snapshot()
        return DatasetProgress(space=space, dataset_id=dataset_id, space_revision=revision, ledger=ledger)

    def mark_keys(self, space: str) -> list[str]:
        return [mark_key(space, self.info.dataset_id, number) for number in range(1, self.num_marks + 1)]

    def status(self, ids: Mapping[str, str]) -> DatasetStatus:
        """Return the dataset's progress for people and programs, with the `ids` of the ranks that have registered."""
        info, ledger = self.info, self.ledger
        return DatasetStatus(
            dataset_id=info.dataset_id,
            path=info.path,
            format=info.format,
            total_samples=info.total_samples,
            shard_size=info.shard_size,
            shuffle=info.shuffle,
            seed=info.seed,
            num_shards=self.plan.num_shards,
            epoch=ledger.epoch,
            num_done=ledger.num_done(ledger.epoch),
            workers=sorted(ids.get(name, name) for name in ledger.workers),
            metadata=info.metadata,
        )

    def _assignment(self, shard_id: int) -> ShardAssignment:
        start, end = self.plan.bounds(shard_id)
        paths, first_row = [self.info.path], start
        if self.info.files:
            rows = self._layout.locate(start, end)
            paths, first_row = [self.info.files[each.file].path for each in rows], rows[0].start
        return ShardAssignment(
            shard_id=shard_id, file_paths=paths, start_sample=start, end_sample=end, first_row=first_row
        )
