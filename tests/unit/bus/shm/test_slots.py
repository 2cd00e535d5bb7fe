"""Slots of shared memory: none is used again while somebody may still read it, and all come back in the end."""

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from unified.bus.shm.layout import (
    FIRST_ENTRY,
    IN_FLIGHT,
    LOST,
    NUM_ENTRIES,
    NUM_WORDS,
    ReaderReferences,
    Use,
    make_mark,
    pid_of,
)
from unified.bus.shm.slots import IDLE_S, MAX_SLOTS, SMALLEST_SLOT, Slot, SlotTable, size_class

MIB = 1024 * 1024
MARK = make_mark(4242, 123456789)


def new_references() -> ReaderReferences:
    return ReaderReferences([0] * NUM_WORDS)


def fresh(table: SlotTable, nbytes: int, *, is_pinned: bool = True) -> Slot:
    plan = table.plan(nbytes)
    assert plan is not None
    slot = Slot(0, plan.capacity, new_references())
    table.add(slot)
    slot.references.begin(1, 1)
    slot.is_pinned = is_pinned
    return slot


@pytest.mark.parametrize("nbytes", [1, SMALLEST_SLOT, SMALLEST_SLOT + 1, MIB, MIB + 1, 5 * MIB, 64 * MIB, 300 * MIB])
def test_a_slot_is_large_enough_and_hardly_larger(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size >= nbytes
    assert size - nbytes < max(MIB, nbytes // 4)
    assert size_class(size) == size


def test_a_mark_names_a_process_and_is_no_message() -> None:
    assert pid_of(MARK) == 4242
    assert 0 < MARK < IN_FLIGHT < LOST
    assert make_mark(4242, 2**50) < IN_FLIGHT


def test_a_claim_is_taken_once_and_with_its_own_tag() -> None:
    references = new_references()
    old = references.begin(1, 1)
    tag = references.begin(1, 1)
    entry = references.grant(0)
    assert entry == 0
    assert references.use(1) is Use.HELD
    assert not references.borrow(entry, old, MARK)
    assert not references.borrow(entry + 1, tag, MARK)
    assert not references.borrow(-1, tag, MARK)
    assert not references.borrow(NUM_ENTRIES, tag, MARK)
    assert references.borrow(entry, tag, MARK)
    assert not references.borrow(entry, tag, MARK)
    references.lose(entry, tag)
    assert references.use(1) is Use.HELD, "what was taken up is not lost"
    references.give_back(entry)
    assert references.use(1) is Use.FREE


def test_a_slot_whose_reader_was_taken_for_dead_is_not_used_again() -> None:
    """It may have looked at its entry before, and write to it after: the slot must not be another message's by then."""
    table = SlotTable(4 * MIB)
    slot = fresh(table, MIB)
    entry = table.grant(slot, "a")
    slot.is_pinned = False
    table.forget("a")
    assert entry is not None
    assert not slot.references.borrow(entry, slot.references.tag, MARK)
    assert table.take(1, 0.0, snug=False) is None
    assert table.trim(0.0, lambda mark: True) == [slot]
    assert (table.total_bytes, len(table)) == (0, 0)


def grant(references: ReaderReferences, row: int = 0) -> int:
    entry = references.grant(row)
    assert entry is not None
    return entry


def handed_on(references: ReaderReferences, entry: int, index: int = 0) -> int:
    sub = references.forward(entry, index, MARK)
    assert sub is not None
    return sub


@pytest.mark.parametrize(("num_parts", "num_readers"), [(1, 1), (1, 64), (100, 1), (100, 8), (10_000, 1), (1, 2000)])
def test_rows_never_meet(num_parts: int, num_readers: int) -> None:
    words = [0] * NUM_WORDS
    references = ReaderReferences(words)
    references.begin(num_parts, num_readers)
    given: list[int] = []
    for row in range(num_readers):
        entry = references.grant(row)
        if entry is None:
            assert row >= NUM_ENTRIES
            break
        given.append(entry)
        index = 0
        while (sub := references.forward(entry, index, 0)) is not None:
            given.append(sub)
            assert references.forward(sub, 0, 0) is None, "a sub-entry has no sub-entries"
            index += 1
    assert len(given) == len(set(given))
    assert sum(word == IN_FLIGHT for word in words[FIRST_ENTRY:]) == len(given)


def test_many_parts_can_be_handed_on_one_by_one() -> None:
    references = new_references()
    references.begin(100, 1)
    assert references.has_sub_entries(grant(references), 100)


def test_who_hands_on_loses_only_what_it_handed_on_itself() -> None:
    """It may remember an entry that another process has by now, in the same use of a slot that is granted again."""
    references = new_references()
    tag = references.begin(1, 1)
    sub = handed_on(references, grant(references))
    references.lose(sub, tag, MARK + 1)
    assert references.is_in_flight(sub, tag)
    references.lose(sub, tag, MARK)
    assert not references.is_in_flight(sub, tag)
    assert not references.borrow(sub, tag, MARK)


def test_rows_are_granted_again_once_they_are_over() -> None:
    table = SlotTable(4 * MIB)
    slot = fresh(table, MIB)
    entries = [table.grant(slot, f"r{row}") for row in range(slot.references.num_rows)]
    assert None not in entries
    assert not table.can_grant(slot, 1)
    assert table.grant(slot, "one too many") is None
    for entry in entries[3:5]:
        assert entry is not None
        assert slot.references.borrow(entry, slot.references.tag, MARK)
        slot.references.give_back(entry)
    assert table.can_grant(slot, 2)
    assert not table.can_grant(slot, 3)
    assert table.grant(slot, "another") == entries[3]
    table.forget("r3")
    assert slot.references.is_in_flight(entries[3] or 0, slot.references.tag), "r3 has nothing to do with it any more"


def test_a_row_is_not_over_while_its_reader_hands_on() -> None:
    references = new_references()
    tag = references.begin(1, 1)
    entry = grant(references, 1)
    assert references.borrow(entry, tag, MARK)
    sub = handed_on(references, entry, 7)
    references.give_back(entry)
    assert not references.is_over(1)
    assert references.borrow(sub, tag, MARK)
    references.give_back(sub)
    assert references.is_over(1)


def test_the_dead_are_cleared_away_and_with_them_what_they_were_handing_on() -> None:
    references = new_references()
    tag = references.begin(1, 2)
    entry, _ = grant(references, 0), grant(references, 1)
    assert references.borrow(entry, tag, MARK)
    handed_on(references, entry)
    references.reap(2, lambda mark: mark != MARK)
    assert references.use(1) is Use.ABANDONED
    assert references.use(2) is Use.HELD, "the other row is still on its way"
    assert not references.is_referenced(lambda mark: True, count_in_flight=False)
    assert references.is_referenced(lambda mark: False)


def test_the_quota_is_kept_and_idle_slots_make_room() -> None:
    table = SlotTable(4 * MIB)
    first, second = fresh(table, MIB), fresh(table, 2 * MIB)
    assert table.plan(2 * MIB) is None
    assert table.total_bytes == 3 * MIB
    first.is_pinned = second.is_pinned = False
    assert table.take(4 * MIB, 1.0) is None
    plan = table.plan(4 * MIB)
    assert plan is not None
    assert plan.given_up == [first, second]
    assert table.total_bytes == 4 * MIB
    table.cancel(plan)
    assert (table.total_bytes, len(table)) == (0, 0)


def test_a_slot_far_too_large_is_taken_only_when_there_can_be_no_other() -> None:
    table = SlotTable(100 * MIB)
    large = fresh(table, 64 * MIB, is_pinned=False)
    assert table.take(MIB, 0.0) is None
    assert table.take(MIB, 0.0, snug=False) is large


def test_the_best_fit_is_taken_and_the_last_used_first() -> None:
    table = SlotTable(100 * MIB)
    slots = [fresh(table, size, is_pinned=False) for size in (3 * MIB, 2 * MIB, 2 * MIB, 4 * MIB)]
    assert table.trim(0.0, lambda mark: True) == []
    assert table.take(2 * MIB - 5, 0.0) is slots[2]
    assert table.take(2 * MIB - 5, 0.0) is slots[1]
    assert table.take(2 * MIB - 5, 0.0) is slots[0]


def test_the_number_of_slots_is_limited() -> None:
    table = SlotTable(MAX_SLOTS * MIB, max_slots=2)
    fresh(table, 1)
    fresh(table, 1)
    assert table.plan(1) is None


def test_idle_slots_go_back_after_a_while() -> None:
    table = SlotTable(100 * MIB)
    slot = fresh(table, MIB, is_pinned=False)
    assert table.trim(5.0, lambda mark: True) == []
    assert table.trim(4.9 + IDLE_S, lambda mark: True) == []
    assert table.trim(5.0 + IDLE_S, lambda mark: True) == [slot]
    assert len(table) == 0


@dataclasses.dataclass(eq=False)
class Message:
    """A descriptor on its way."""

    slot: Slot
    entry: int
    tag: int
    content: int
    reader: str
    sender: str
    mark: int = 0
    """Of the reader that handed it on."""


@dataclasses.dataclass(eq=False)
class Held:
    """A reference that a living process has."""

    slot: Slot
    entry: int
    tag: int
    content: int
    reader: str
    mark: int
    num_forwarded: int = 0


READERS = ["a", "b", "c"]


class Pool(RuleBasedStateMachine):
    """One owner, three readers that forward to each other, die, and are taken for dead while they live.

    Some slots are exported for one message, and some, which were written in place, for any number.
    """

    exported = Bundle("exported")

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(6 * MIB)
        self.now = 0.0
        self.pids = dict(zip(READERS, range(1, 4), strict=True))
        self.next_pid = 10
        self.next_content = 1
        self.content: dict[Slot, int] = {}
        """What is in each slot now; those that were given up keep theirs."""
        self.num_readers: dict[Slot, int] = {}
        self.open: dict[Slot, int] = {}
        """Slots that are exported, and what their owner put there."""
        self.handed_on: dict[tuple[Slot, int, int], tuple[str, int]] = {}
        """By slot, entry and mark: to whom a reader handed it on, and in which use. It may not know what came of it."""
        self.messages: list[Message] = []
        self.half_taken: list[Message] = []
        self.held: list[Held] = []
        self.suspected: set[str] = set()

    def mark(self, reader: str) -> int:
        return make_mark(self.pids[reader], 1)

    def is_alive(self, mark: int) -> bool:
        return pid_of(mark) in self.pids.values()

    @rule(target=exported, nbytes=st.sampled_from([1, 2 * MIB]))
    def allocate(self, nbytes: int) -> tuple[Slot, int] | None:
        """What is written in place; with rows so wide that there are three."""
        what: tuple[Slot, int] | None = self.export(nbytes, 1)  # type: ignore[assignment]  # as hypothesis types a rule
        if what is not None:
            what[0].references.begin(200, 1)
            self.num_readers[what[0]] = 1000
            assert what[0].references.num_rows == 3
        return what

    @rule(target=exported, nbytes=st.sampled_from([1, MIB, 2 * MIB, 3 * MIB]), num_readers=st.integers(1, 3))
    def export(self, nbytes: int, num_readers: int) -> tuple[Slot, int] | None:
        slot = self.table.take(nbytes, self.now)
        if slot is None:
            plan = self.table.plan(nbytes)
            if plan is None:
                slot = self.table.take(nbytes, self.now, snug=False)
                if slot is None:
                    return None
            else:
                slot = Slot(self.next_content, plan.capacity, new_references())
                self.table.add(slot)
        assert slot.is_pinned
        slot.references.begin(1, num_readers)
        assert slot not in self.open, "what is still looked at by its owner was taken"
        self.content[slot] = self.open[slot] = self.next_content
        self.num_readers[slot] = num_readers
        self.next_content += 1
        return slot, self.content[slot]

    @rule(what=exported, reader=st.sampled_from(READERS))
    def grant(self, what: tuple[Slot, int] | None, reader: str) -> None:
        if what is None or not what[0].is_pinned or self.content[what[0]] != what[1]:
            return
        slot, content = what
        if len(slot.readers) >= self.num_readers[slot]:
            return
        is_possible = self.table.can_grant(slot, 1)
        entry = self.table.grant(slot, reader)
        assert (entry is not None) == is_possible
        if entry is None:
            assert self.num_readers[slot] == 1000
            return
        self.messages.append(Message(slot, entry, slot.references.tag, content, reader, "owner"))

    @rule(what=exported)
    def release(self, what: tuple[Slot, int] | None) -> None:
        if what is not None and self.content[what[0]] == what[1]:
            what[0].is_pinned = False
            self.open.pop(what[0], None)

    @rule(nbytes=st.sampled_from([1, MIB]), readers=st.lists(st.sampled_from(READERS), min_size=1, max_size=2))
    def send(self, nbytes: int, readers: list[str]) -> None:
        """All of it at once, as is usual."""
        what = self.export(nbytes, len(readers))
        for reader in readers:
            self.grant(what, reader)
        self.release(what)

    @precondition(lambda self: self.messages)
    @rule(data=st.data())
    def begin_to_take(self, data: st.DataObject) -> None:
        """The reader has looked at its entry, and not yet written to it."""
        message = self.messages.pop(data.draw(st.integers(0, len(self.messages) - 1)))
        if message.slot.references.is_in_flight(message.entry, message.tag):
            self.half_taken.append(message)

    @precondition(lambda self: self.half_taken)
    @rule()
    def take(self) -> None:
        message = self.half_taken.pop()
        mark = self.mark(message.reader)
        message.slot.references._words[FIRST_ENTRY + message.entry] = mark
        self.held.append(Held(message.slot, message.entry, message.tag, message.content, message.reader, mark))

    @precondition(lambda self: self.messages)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        message = self.messages.pop(data.draw(st.integers(0, len(self.messages) - 1)))
        mark = self.mark(message.reader)
        if message.slot.references.borrow(message.entry, message.tag, mark):
            assert self.content[message.slot] == message.content, "a message leads to what was sent"
            self.held.append(Held(message.slot, message.entry, message.tag, message.content, message.reader, mark))
        else:
            assert {message.reader, message.sender} & self.suspected, "nothing is lost without a reason"

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        held.slot.references.give_back(held.entry)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), reader=st.sampled_from(READERS))
    def forward(self, data: st.DataObject, reader: str) -> None:
        held = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        entry = held.slot.references.forward(held.entry, held.num_forwarded, held.mark)
        held.num_forwarded += 1
        if entry is not None:
            self.messages.append(Message(held.slot, entry, held.tag, held.content, reader, held.reader, held.mark))
            self.handed_on[held.slot, entry, held.mark] = (reader, held.tag)

    @rule(reader=st.sampled_from(READERS))
    def suspect(self, reader: str) -> None:
        """It is taken for dead, by the owner and by those who forward to it."""
        self.suspected.add(reader)
        self.table.forget(reader)
        for (slot, entry, mark), (other, tag) in self.handed_on.items():
            if other == reader and self.is_alive(mark):
                slot.references.lose(entry, tag, mark)

    @rule(reader=st.sampled_from(READERS))
    def die(self, reader: str) -> None:
        """Nothing is given back; what was on its way to it never arrives; later it is known to be dead."""
        self.held = [held for held in self.held if held.reader != reader]
        self.pids[reader] = self.next_pid
        self.next_pid += 1
        self.suspect(reader)
        self.messages = [message for message in self.messages if message.reader != reader]
        self.half_taken = [message for message in self.half_taken if message.reader != reader]

    @rule(seconds=st.floats(0.1, 20.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for slot in self.table.trim(self.now, self.is_alive):
            assert not slot.is_pinned

    @invariant()
    def nobody_reads_what_was_overwritten(self) -> None:
        for held in self.held:
            assert self.content[held.slot] == held.content

    @invariant()
    def the_quota_holds(self) -> None:
        assert 0 <= self.table.total_bytes <= 6 * MIB

    def teardown(self) -> None:
        for slot in self.content:
            slot.is_pinned = False
        for message in self.messages:
            self.suspected |= {message.reader}
        for reader in READERS:
            self.die(reader)
        self.table.trim(self.now + 10, self.is_alive)
        self.table.trim(self.now + 20 + IDLE_S, self.is_alive)
        assert (len(self.table), self.table.total_bytes) == (0, 0), "everything comes back"


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=50)
