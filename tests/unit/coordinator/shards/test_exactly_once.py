"""Workers that join, leave, die, report late and read ahead, with a coordinator that restarts: every sample once."""

from collections import Counter

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from unified.coordinator.core.shards.ledger import Ledger, LedgerSnapshot
from unified.coordinator.core.shards.plan import ShardPlan
from unified.errors import DatasetError

NAMES = st.sampled_from([f"worker-{number}" for number in range(6)])
WHICH = st.integers(0, 5)
"""Of the readers there are, whatever their names."""


class Reader:
    """A worker that reads the list that it knows, and asks for another when it is told that there may be one."""

    def __init__(self, name: str, epoch: int) -> None:
        self.name = name
        self.epoch = epoch
        self.revision = -1
        self.known: list[int] = []
        self.in_hand: int | None = None

    def take_next(self, ledger: Ledger) -> None:
        """Begin with a shard, if there is one: it knows the revision from the answer to its last report."""
        shards = ledger.shards_of(self.name, self.epoch)
        if self.revision == ledger.revision:
            assert self.known == shards, "the list changed, and nobody said so"
        self.known, self.revision = shards, ledger.revision
        self.in_hand = shards[0] if shards else None


class Reading(RuleBasedStateMachine):
    @initialize(
        num_samples=st.integers(0, 60), shard_size=st.integers(1, 3), shuffle=st.booleans(), names=st.sets(NAMES)
    )
    def begin(self, num_samples: int, shard_size: int, shuffle: bool, names: set[str]) -> None:
        self.plan = ShardPlan(
            dataset_id="d", total_samples=num_samples, shard_size=shard_size, shuffle=shuffle, seed=num_samples
        )
        self.ledger = Ledger(self.plan, names)
        self.readers = {name: Reader(name, 0) for name in names}
        self.served: Counter[tuple[int, int]] = Counter()
        """(epoch, sample) that was read to the end and counted."""
        self.late: list[tuple[int, str, int]] = []
        """What readers that are gone had in hand."""
        self.kept = self.ledger.snapshot()
        self.since: list[tuple[int, list[int]]] = []

    @rule(name=NAMES)
    def join(self, name: str) -> None:
        if name not in self.readers:
            self.readers[name] = Reader(name, self.ledger.epoch)
            assert self.ledger.set_workers(self.readers)

    @precondition(lambda self: self.readers)
    @rule(which=WHICH)
    def leave_or_die(self, which: int) -> None:
        reader = self.reader(which)
        del self.readers[reader.name]
        if reader.in_hand is not None:
            self.late.append((reader.epoch, reader.name, reader.in_hand))
        assert self.ledger.set_workers(self.readers)

    @precondition(lambda self: self.readers)
    @rule(which=WHICH)
    def start_again(self, which: int) -> None:
        """A new incarnation of a worker that was never missed: it does not know where the last one was."""
        name = self.reader(which).name
        self.readers[name] = Reader(name, self.ledger.epoch)

    @precondition(lambda self: self.readers)
    @rule(which=WHICH, count=st.integers(1, 6))
    def read(self, which: int, count: int) -> None:
        for _ in range(count):
            self.read_one(self.reader(which))

    def read_one(self, reader: Reader) -> None:
        if reader.in_hand is not None:
            self.finish(reader)
        reader.take_next(self.ledger)
        if reader.in_hand is None:
            reader.epoch += 1  # it does not wait for the others
            reader.known, reader.revision = [], -1
            return
        others = [each for each in self.readers.values() if each is not reader and each.epoch == reader.epoch]
        assert reader.in_hand not in [each.in_hand for each in others], "two are reading the same"
        assert not any(self.served[reader.epoch, sample] for sample in range(*self.plan.bounds(reader.in_hand)))

    @precondition(lambda self: self.readers)
    @rule(which=WHICH, count=st.integers(1, 4))
    def report_many(self, which: int, count: int) -> None:
        """A worker that reads several, in whatever order, and reports them at once."""
        reader = self.reader(which)
        if reader.in_hand is None:
            shards = self.ledger.shards_of(reader.name, reader.epoch)[-count:]
            self.count(reader.epoch, self.ledger.mark_done(reader.epoch, reader.name, [*reversed(shards), *shards]))
            reader.revision = -1

    @precondition(lambda self: self.late)
    @rule()
    def report_late(self) -> None:
        epoch, name, shard = self.late.pop()
        if name not in self.readers:
            assert self.ledger.mark_done(epoch, name, [shard]) == []

    @precondition(lambda self: self.ledger.num_done(self.ledger.epoch) == self.plan.num_shards)
    @rule()
    def next_epoch(self) -> None:
        """When all of it was read, as a trainer does; and readers that were ahead go on where they were."""
        if self.plan.num_shards:
            epoch = self.ledger.epoch
            assert all(self.served[epoch, sample] == 1 for sample in range(self.plan.total_samples))
            assert self.ledger.advance(epoch + 1)
            for reader in self.readers.values():
                if reader.epoch <= epoch:
                    reader.epoch, reader.in_hand, reader.revision = epoch + 1, None, -1

    @rule(epochs_ahead=st.integers(-2, 1), data=st.data())
    def all_go_back(self, epochs_ahead: int, data: st.DataObject) -> None:
        """To a position in a checkpoint: what was read of it stays, and whatever came after it comes again."""
        epoch = max(0, self.ledger.epoch + epochs_ahead)
        ids = st.sets(st.integers(0, self.plan.num_shards - 1)) if self.plan.num_shards else st.just(set[int]())
        done = data.draw(ids)
        revision = self.ledger.revision
        self.ledger.rewind(epoch, done)
        assert self.ledger.revision > revision
        assert (self.ledger.epoch, self.ledger.num_done(epoch)) == (epoch, len(done))
        assert self.ledger.num_done(epoch + 1) == 0
        self.served = Counter({key: 1 for key in self.served if key[0] < epoch})
        self.served.update((epoch, sample) for shard in done for sample in range(*self.plan.bounds(shard)))
        self.readers = {name: Reader(name, epoch) for name in self.readers}
        self.late = []

    @rule()
    def coordinator_restarts(self) -> None:
        """It kept a snapshot of each revision, and what counted since."""
        snapshot = msgspec.msgpack.decode(msgspec.msgpack.encode(self.kept), type=LedgerSnapshot)
        restored = Ledger.restore(snapshot)
        for epoch in {epoch for epoch, _ in self.since}:
            restored.redo(epoch, [shard for each, shards in self.since if each == epoch for shard in shards])
        assert restored.revision == self.ledger.revision
        for epoch in self.ledger.open_epochs:
            for name in self.readers:
                assert restored.shards_of(name, epoch) == self.ledger.shards_of(name, epoch)
            assert restored.num_done(epoch) == self.ledger.num_done(epoch)
        self.ledger = restored

    @invariant()
    def rules_hold(self) -> None:
        if hasattr(self, "ledger"):
            assert self.ledger.check() == []
            assert max(self.served.values(), default=1) == 1, "a sample counted twice"
            if self.kept.revision != self.ledger.revision:
                self.kept, self.since = self.ledger.snapshot(), []

    def reader(self, which: int) -> Reader:
        return list(self.readers.values())[which % len(self.readers)]

    def finish(self, reader: Reader) -> None:
        assert reader.in_hand is not None
        counted = self.ledger.mark_done(reader.epoch, reader.name, [reader.in_hand])
        assert counted == [reader.in_hand], "what a worker has in hand stays its own"
        reader.known = reader.known[1:]
        self.count(reader.epoch, counted)

    def count(self, epoch: int, shard_ids: list[int]) -> None:
        for shard in shard_ids:
            self.served.update((epoch, sample) for sample in range(*self.plan.bounds(shard)))
        if shard_ids:
            self.since.append((epoch, shard_ids))

    def teardown(self) -> None:
        """Whoever is left reads the current epoch to its end."""
        if not hasattr(self, "ledger"):
            return
        epoch = self.ledger.epoch
        self.readers.setdefault("last", Reader("last", epoch))
        self.ledger.set_workers(self.readers)
        for reader in self.readers.values():
            if reader.in_hand is not None:
                self.finish(reader)
        for name in self.readers:
            for shard in self.ledger.shards_of(name, epoch):
                self.count(epoch, self.ledger.mark_done(epoch, name, [shard]))
        assert all(self.served[epoch, sample] == 1 for sample in range(self.plan.total_samples))
        assert self.ledger.num_done(epoch) == self.plan.num_shards
        if epoch:
            with pytest.raises(DatasetError, match="is past"):
                self.ledger.shards_of("last", epoch - 1)


TestReading = Reading.TestCase
TestReading.settings = settings(max_examples=150, stateful_step_count=40)
