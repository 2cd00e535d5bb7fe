"""Whatever is lost, repeated or killed: each item that was put is done by one consumer, once, and in order.

The machine plays the network (questions and answers that are lost and asked again), the workers (which die, with and
without a next incarnation) and the disk of a durable queue (an owner that dies loses what was not committed, and
with it the answers, which wait for the commit). Its producers and consumers are those of `DataQueue`, without threads.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.invariants.queue import check, ids
from tests.support.queue_core import JournalModel
from unified.queue.core.messages import (
    Action,
    AnswerGet,
    AnswerPut,
    CloseAsked,
    ConsumerEnded,
    DropItems,
    Event,
    GetAsked,
    HandleAttached,
    IncarnationEnded,
    Outcome,
    PutAsked,
    QueueTick,
    TakeDone,
    TakeReturned,
)
from unified.queue.core.queue import QueueCore

T = TypeVar("T")


def pick(data: st.DataObject, objects: Sequence[T]) -> T:
    """Draw one by its number: `sampled_from` would look at hashes, which of these objects are their addresses."""
    return objects[data.draw(st.integers(0, len(objects) - 1))]


class Worker(msgspec.Struct, eq=False):
    """One incarnation of a worker, with one handle."""

    name: str
    incarnation: int
    handle: int


class PendingPut(msgspec.Struct):
    number: int
    items: list[str]
    request_id: int | None = None
    """None: the question or its answer was lost, so it has to be asked again."""
    was_answered: bool = False
    """With WAITING: the owner has the items."""


class Producer(msgspec.Struct, eq=False):
    """Puts one after the other, or several at once."""

    worker: Worker
    number: int = 0
    pending: dict[int, PendingPut] = {}

    def ask(self, put: PendingPut, request_id: int, wait_s: float | None, is_last: bool) -> PutAsked:
        put.request_id = request_id
        return PutAsked(
            request_id=request_id,
            handle=self.worker.handle,
            number=put.number,
            below=min(self.pending, default=self.number),
            items=None if put.was_answered else [(item, 1) for item in put.items],
            wait_s=wait_s,
            is_last=is_last,
        )


class Consumer(msgspec.Struct, eq=False):
    """A thread that takes. It is done with what it has when it asks for more."""

    worker: Worker
    consumer: int
    number: int = 0
    received: int = 0
    has: list[str] = []
    """What it received and is not done with."""
    num_done: int = 0
    """Of the same take, before these."""
    has_ended: bool = False
    """It was told that the queue is closed."""
    is_asking: bool = False
    request_id: int | None = None
    """Of the get that it waits for; None while `is_asking`: ask again."""
    unheard: list[str] = []
    """What it is done with, and the owner may not know so."""

    def ask(self, request_id: int, max_items: int, wait_s: float | None) -> GetAsked:
        if not self.is_asking:
            self.number += 1
            self.is_asking = True
        self.request_id = request_id
        return GetAsked(
            request_id=request_id,
            handle=self.worker.handle,
            consumer=self.consumer,
            number=self.number,
            received=self.received,
            max_items=max_items,
            wait_s=wait_s,
        )


class Answer(NamedTuple):
    """On its way to whoever waits for this request id."""

    request_id: int
    outcome: Outcome
    num_in: int
    items: list[str]


WAITS = st.sampled_from([None, 0.0, 1.0])
NAMES = st.sampled_from("abc")
FATES = st.sampled_from(["fine", "fine", "question lost", "answer lost", "answer lost"])


class QueueMachine(RuleBasedStateMachine):
    @initialize(size=st.integers(1, 4), max_bytes=st.sampled_from([None, 2]), is_durable=st.booleans())
    def begin(self, size: int, max_bytes: int | None, is_durable: bool) -> None:
        self.options: dict[str, Any] = {"name": "q", "size": size, "max_bytes": max_bytes, "is_durable": is_durable}
        self.is_durable = is_durable
        self.now = 0.0
        self.ids = 0
        self.core = QueueCore(self.now, **self.options)
        self.journal = JournalModel()
        self.uncommitted: list[Action] = []
        self.answers: list[Answer] = []
        self.incarnations: dict[str, int] = {}
        self.producers: list[Producer] = []
        self.consumers: list[Consumer] = []
        self.open: set[int] = set()
        self.will_be_lost: set[int] = set()
        self.put_line: list[tuple[int, int]] = []
        self.get_line: list[int] = []
        self.newest_taken = -1
        self.accepted: set[str] = set()
        """Items of which a producer knows that they are in."""
        self.offered: set[str] = set()
        self.done: Counter[str] = Counter()
        self.work("a")
        self.work("b")

    # What happens

    @rule(name=NAMES)
    def work(self, name: str) -> None:
        """A worker comes up, or takes another handle: one of its threads puts, two others take."""
        worker = Worker(name, self.incarnations.setdefault(name, 0), self.new_id())
        self.tell(HandleAttached(handle=worker.handle, worker=name, incarnation=worker.incarnation))
        self.producers.append(Producer(worker))
        self.consumers += [Consumer(worker, self.new_id()) for _ in range(2)]

    @precondition(lambda self: self.producers)
    @rule(data=st.data(), count=st.integers(1, 5), wait_s=WAITS, is_last=st.booleans(), fate=FATES)
    def put(self, data: st.DataObject, count: int, wait_s: float | None, is_last: bool, fate: str) -> None:
        producer = pick(data, self.producers)
        pending = PendingPut(producer.number, [f"i{self.new_id()}" for _ in range(count)])
        producer.number += 1
        producer.pending[pending.number] = pending
        self.offered.update(pending.items)
        if fate != "question lost":
            self.tell(producer.ask(pending, self.new_request_id(fate), wait_s, is_last))

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), max_items=st.integers(1, 4), wait_s=WAITS, fate=FATES)
    def get(self, data: st.DataObject, max_items: int, wait_s: float | None, fate: str) -> None:
        consumer = pick(data, self.idle())
        self.finish(consumer, len(consumer.has))
        question = consumer.ask(self.new_request_id(fate), max_items, wait_s)
        if fate != "question lost":
            consumer.unheard = []
            self.tell(question)
        else:
            consumer.request_id = None

    @rule(wait_s=WAITS, max_items=st.integers(1, 3))
    def ask_again(self, wait_s: float | None, max_items: int = 2) -> None:
        """Whoever heard nothing does; of a get that was given up, the next one."""
        for consumer in self.consumers:
            if consumer.is_asking and consumer.request_id is None:
                consumer.unheard = []
                self.tell(consumer.ask(self.new_id(), max_items, wait_s))
        for producer in self.producers:
            for put in producer.pending.values():
                if put.request_id is None:
                    self.tell(producer.ask(put, self.new_id(), wait_s, False))

    @precondition(lambda self: any(each.pending for each in self.producers))
    @rule(data=st.data())
    def give_up_a_put(self, data: st.DataObject) -> None:
        """Its producer has heard nothing for too long, and does not care any more."""
        producer = pick(data, [each for each in self.producers if each.pending])
        del producer.pending[data.draw(st.sampled_from(sorted(producer.pending)))]

    @rule()
    def answers_arrive(self) -> None:
        self.commit()
        while self.answers:
            self.deliver(self.answers.pop(0))

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def one_answer_arrives(self, data: st.DataObject) -> None:
        self.deliver(self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1))))

    @precondition(lambda self: self.idle(has_items=True))
    @rule(data=st.data(), count=st.integers(1, 4))
    def task_done(self, data: st.DataObject, count: int) -> None:
        consumer = pick(data, self.idle(has_items=True))
        self.commit()
        had, upto = consumer.num_done, min(count, len(consumer.has))
        self.finish(consumer, upto)
        consumer.unheard = []
        consumer.num_done += upto
        self.tell(
            TakeDone(
                handle=consumer.worker.handle,
                consumer=consumer.consumer,
                number=consumer.number,
                count=had + upto if consumer.has else None,
            )
        )
        self.commit()  # it waits for the answer

    @precondition(lambda self: self.idle(has_items=True))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        consumer = pick(data, self.idle(has_items=True))
        consumer.has = []
        self.return_take(consumer, consumer.number - 1)

    @precondition(lambda self: self.interruptible())
    @rule(data=st.data())
    def interrupt(self, data: st.DataObject) -> None:
        """A get is given up, whether or not it has been served."""
        consumer = pick(data, self.interruptible())
        consumer.is_asking, consumer.request_id = False, None
        self.return_take(consumer, consumer.received)
        consumer.unheard = []

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def thread_ends(self, data: st.DataObject) -> None:
        consumer = pick(data, self.idle())
        self.consumers.remove(consumer)
        self.finish(consumer, len(consumer.has))
        handle = consumer.worker.handle
        self.tell(ConsumerEnded(handle=handle, consumer=consumer.consumer, received=consumer.received))
        self.commit()

    @rule(name=NAMES)
    def die(self, name: str) -> None:
        incarnation = self.incarnations.get(name)
        if incarnation is None:
            return
        self.incarnations[name] = incarnation + 1
        for consumer in self.consumers:
            if consumer.worker.name == name:
                self.done.subtract(consumer.unheard)  # nobody was told: another one will do them again
        self.producers = [each for each in self.producers if each.worker.name != name]
        self.consumers = [each for each in self.consumers if each.worker.name != name]
        self.tell(IncarnationEnded(worker=name, incarnation=incarnation))

    @rule(seconds=st.sampled_from([0.1, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if self.core.next_deadline is not None and self.core.next_deadline <= self.now:
            self.tell(QueueTick())

    @rule()
    def commit(self) -> None:
        for action in self.uncommitted:
            if isinstance(action, AnswerPut):
                self.answers.append(Answer(action.request_id, action.outcome, action.num_in, []))
            elif isinstance(action, AnswerGet):
                items = [item.payload for item in action.items]
                self.answers.append(Answer(action.request_id, action.outcome, 0, items))
            else:
                self.journal.write(action)
        self.uncommitted = []

    @precondition(lambda self: self.is_durable)
    @rule()
    def owner_restarts(self) -> None:
        """What was not committed is gone, with its answers; those on their way still arrive, or not."""
        dropped = [
            self.journal.items[each] for act in self.uncommitted if isinstance(act, DropItems) for each in act.item_ids
        ]
        self.uncommitted = []
        self.open.clear()
        self.put_line, self.get_line = [], []
        self.core = QueueCore(self.now, **self.options, memory=self.journal.memory())
        self.newest_taken = max(self.journal.leases, default=-1)
        coming = {answer.request_id for answer in self.answers}
        leased = self.leased()
        for producer in self.producers:
            for put in producer.pending.values():
                put.request_id = put.request_id if put.request_id in coming else None
        for consumer in self.consumers:
            consumer.request_id = consumer.request_id if consumer.request_id in coming else None
            if consumer.is_asking:
                consumer.unheard = [item for item in leased.get(consumer.consumer, []) if self.done[item]]
        heard = {item for consumer in self.consumers for item in consumer.unheard}
        self.done.subtract(
            item.payload for item in dropped if item.payload not in heard
        )  # of consumers that died since
        for name, incarnation in self.incarnations.items():  # the directory says so again
            self.tell(IncarnationEnded(worker=name, incarnation=incarnation - 1))
        workers = [*(each.worker for each in self.producers), *(each.worker for each in self.consumers)]
        for worker in dict.fromkeys(workers):
            self.tell(HandleAttached(handle=worker.handle, worker=worker.name, incarnation=worker.incarnation))

    # What must be true

    @invariant()
    def state_is_sound(self) -> None:
        if hasattr(self, "core"):
            assert check(self.core) == []
            assert all(count in (0, 1) for count in self.done.values()), "an item was done twice"

    @invariant()
    def journal_holds_what_the_queue_holds(self) -> None:
        if hasattr(self, "core") and self.is_durable and not self.uncommitted:
            again = QueueCore(self.now, **self.options, memory=self.journal.memory())
            assert ids(again.buffer) == ids(self.core.buffer)
            assert again.consumers.num_leased == self.core.consumers.num_leased
            known = {key: handle.ended_puts for key, handle in self.core.state.handles.items()}
            assert {key: dict(handle.ended_puts) for key, handle in again.state.handles.items()} == known

    def teardown(self) -> None:
        """Close it, and let whoever lives do the rest."""
        if not hasattr(self, "core"):
            return
        self.work("a")
        self.ask_again(None)
        self.tell(CloseAsked())
        while self.producers or self.consumers:
            self.answers_arrive()
            self.producers = [each for each in self.producers if each.pending]
            self.consumers = [each for each in self.consumers if not each.has_ended]
            for consumer in self.idle():
                self.finish(consumer, len(consumer.has))
                consumer.ask(0, 3, None)
                consumer.request_id = None
            self.ask_again(None)
        assert self.core.is_finished
        assert not self.open, "a question was never answered"
        lost = {item for item in self.accepted if self.done[item] != 1}
        assert not lost, f"accepted and not done once: {lost}"
        assert {item for item, count in self.done.items() if count} <= self.offered

    # How

    def tell(self, event: Event) -> None:
        if isinstance(event, PutAsked | GetAsked):
            self.open.add(event.request_id)
        if isinstance(event, PutAsked) and (event.handle, event.number) not in self.put_line:
            self.put_line.append((event.handle, event.number))
        if isinstance(event, GetAsked):
            self.get_line.append(event.request_id)
        num_put = self.core.producers.rate.total
        actions = self.core.step(self.now, event)
        assert self.core.producers.rate.total == num_put or len(self.core.buffer) <= self.core.buffer.size, "too full"
        self.uncommitted += actions
        for action in actions:
            if isinstance(action, AnswerPut | AnswerGet):
                self.open.remove(action.request_id)  # KeyError: answered twice
            if isinstance(action, AnswerGet):
                self.was_served_in_turn(action)
        self.entered_in_turn()
        if not self.is_durable:
            self.commit()

    def was_served_in_turn(self, action: AnswerGet) -> None:
        place = self.get_line.index(action.request_id)
        new = [item.item_id for item in action.items if item.item_id > self.newest_taken]
        if action.outcome is Outcome.DONE and new:
            still_waiting = {get.request_id for get in self.core.consumers.waiting.values()}
            assert not still_waiting & set(self.get_line[:place]), "an earlier get was passed over"
        assert new == list(range(self.newest_taken + 1, self.newest_taken + 1 + len(new))) or self.is_durable
        self.newest_taken = max([self.newest_taken, *new])
        del self.get_line[place]

    def entered_in_turn(self) -> None:
        """Whoever waits for room came after all that went in, or went in in part and is next."""
        line = list(self.core.producers.waiting)
        self.put_line = [key for key in self.put_line if key in self.core.producers.waiting]
        assert line == self.put_line, "puts changed places"
        assert all(not put.num_in for put in list(self.core.producers.waiting.values())[1:]) or self.is_durable

    def deliver(self, answer: Answer) -> None:
        arrives = answer.request_id not in self.will_be_lost
        for producer in self.producers:
            for put in list(producer.pending.values()):
                if put.request_id == answer.request_id:
                    put.request_id = None
                    if arrives:
                        self.on_put_answer(producer, put, answer)
        for consumer in self.consumers:
            if consumer.request_id == answer.request_id:
                consumer.request_id = None
                if arrives and answer.outcome in (Outcome.DONE, Outcome.CLOSED):
                    assert not consumer.has
                    consumer.has, consumer.num_done, consumer.received = answer.items, 0, consumer.number
                    consumer.is_asking, consumer.has_ended = False, answer.outcome is Outcome.CLOSED

    def on_put_answer(self, producer: Producer, put: PendingPut, answer: Answer) -> None:
        if answer.outcome is Outcome.WAITING:
            put.was_answered = True
        elif answer.outcome is Outcome.UNKNOWN:
            put.was_answered = False
        else:
            self.accepted.update(put.items[: answer.num_in])
            del producer.pending[put.number]

    def finish(self, consumer: Consumer, count: int) -> None:
        """It has done these; the owner does not know yet."""
        items, consumer.has = consumer.has[:count], consumer.has[count:]
        self.done.update(items)
        consumer.unheard = consumer.unheard + items

    def return_take(self, consumer: Consumer, received: int) -> None:
        worker, number = consumer.worker, consumer.number
        self.tell(TakeReturned(handle=worker.handle, consumer=consumer.consumer, number=number, received=received))
        self.commit()

    def idle(self, has_items: bool = False) -> list[Consumer]:
        return [each for each in self.consumers if not each.is_asking and (each.has or not has_items)]

    def interruptible(self) -> list[Consumer]:
        return [each for each in self.consumers if each.is_asking]

    def leased(self) -> dict[int, list[str]]:
        return {
            consumer.consumer: [item.payload for item in consumer.lease.items]
            for handle in self.core.state.handles.values()
            for consumer in handle.consumers.values()
            if consumer.lease is not None
        }

    def new_request_id(self, fate: str) -> int:
        request_id = self.new_id()
        if fate == "answer lost":
            self.will_be_lost.add(request_id)
        return request_id

    def new_id(self) -> int:
        self.ids += 1
        return self.ids


TestQueueLeases = QueueMachine.TestCase
TestQueueLeases.settings = settings(max_examples=200, stateful_step_count=50)
