"""Order, lines, bounds, leases and ends of a queue, one story each."""

import msgspec
import pytest

from tests.support.queue_core import Story, said
from unified.queue.core.messages import (
    CloseAsked,
    ConsumerEnded,
    HandleClosed,
    IncarnationEnded,
    Outcome,
    PutAsked,
    QueueTick,
    TakeReturned,
)
from unified.queue.core.state import Rate


def in_(count: int) -> tuple[Outcome, int]:
    return (Outcome.DONE, count)


def story(size: int = 3, **options: object) -> Story:
    """Handle 1 of worker w1, handle 2 of w2, handle 3 of w3."""
    made = Story(size, **options)  # type: ignore[arg-type]
    for handle in (1, 2, 3):
        made.attach(handle)
    return made


@pytest.fixture
def tale() -> Story:
    return story()


def test_items_leave_in_the_order_in_which_they_came(tale: Story) -> None:
    assert tale.put(1, 0, "a", "b") == [(1, in_(2))]
    assert tale.put(2, 0, "c") == [(2, in_(1))]
    assert tale.get(31, 1, 2) == [(3, ["a", "b"])]
    assert tale.get(31, 2, 2) == [(4, ["c"])]


def test_get_waits_until_there_is_an_item(tale: Story) -> None:
    assert tale.get(21, 1, 5) == []
    assert tale.put(1, 0, "a", "b") == [(2, in_(2)), (1, ["a", "b"])]


def test_gets_are_served_in_the_order_in_which_they_were_asked(tale: Story) -> None:
    tale.get(21, 1)
    tale.get(31, 1)
    assert tale.put(1, 0, "a")[1:] == [(1, ["a"])]
    assert tale.put(1, 1, "b")[1:] == [(2, ["b"])]


def test_what_comes_is_shared_among_those_who_wait() -> None:
    tale = story(10)
    tale.get(21, 1, 100)
    tale.get(31, 1, 100)
    tale.get(32, 1, 1)
    assert tale.put(1, 0, *"abcdefg")[1:] == [(1, ["a", "b", "c"]), (2, ["d", "e"]), (3, ["f"])]
    assert tale.waiting == ["g"]


def test_full_queue_lets_a_put_in_as_soon_as_there_is_room() -> None:
    tale = story(2)
    tale.put(1, 0, "a", "b")
    assert tale.put(1, 1, "c") == []
    assert tale.get(31, 1) == [(3, ["a"]), (2, in_(1))]
    assert tale.waiting == ["b", "c"]


def test_puts_wait_in_line_and_a_small_one_does_not_overtake() -> None:
    tale = story(2)
    tale.put(1, 0, "a", "b")
    tale.put(1, 1, "c", "d")
    tale.put(2, 0, "e")
    assert tale.get(31, 1) == [(4, ["a"])]
    assert tale.waiting == ["b", "c"]
    assert tale.get(31, 2) == [(5, ["b"]), (2, in_(2))]
    assert tale.get(31, 3) == [(6, ["c"]), (3, in_(1))]
    assert tale.waiting == ["d", "e"]


def test_put_larger_than_the_queue_goes_through_it() -> None:
    tale = story(2)
    assert tale.put(1, 0, *"abcde") == []
    taken = [tale.get(31, number, 5) for number in (1, 2, 3)]
    assert taken == [[(2, ["a", "b"])], [(3, ["c", "d"]), (1, in_(5))], [(4, ["e"])]]


def test_put_larger_than_the_queue_passes_waiting_gets_at_once() -> None:
    tale = story(1)
    tale.get(21, 1, 5)
    tale.get(31, 1, 5)
    assert tale.put(1, 0, *"abc") == [(1, ["a"]), (2, ["b"]), (3, in_(3))]


def test_bytes_bound_the_queue_and_one_item_always_fits() -> None:
    tale = story(10, max_bytes=3)
    big = PutAsked(request_id=0, handle=1, number=0, below=0, items=[("big", 10), ("a", 1), ("b", 2), ("c", 1)])
    assert tale.tell(big) == []
    assert tale.waiting == ["big"]
    assert tale.get(31, 1)[0] == (1, ["big"])
    assert tale.waiting == ["a", "b"]


def test_put_that_gives_up_at_once_lets_in_what_waited_behind_it() -> None:
    tale = story(10, max_bytes=3)
    for request_id, handle, items, wait_s in [
        (1, 1, [("a", 2), ("big", 5)], None),
        (2, 2, [("b", 1)], None),
        (3, 1, None, 0.0),
    ]:
        asked = PutAsked(request_id=request_id, handle=handle, number=0, below=0, items=items, wait_s=wait_s)
        answers = said(tale.tell(msgspec.structs.replace(asked, is_last=wait_s == 0)))
    assert answers == [(1, (Outcome.WAITING, 1)), (3, (Outcome.FULL, 1)), (2, in_(1))]
    assert tale.waiting == ["a", "b"]


def test_nowait_finds_nothing_and_waits_for_nothing() -> None:
    tale = story(1)
    assert tale.get(31, 1, wait_s=0) == [(1, Outcome.WAITING)]
    tale.put(1, 0, "a")
    assert tale.put(1, 1, "b", wait_s=0, is_last=True) == [(3, (Outcome.FULL, 0))]
    assert tale.core.next_deadline is None


def test_time_ends_a_get_and_its_items_stay(tale: Story) -> None:
    tale.get(31, 1, wait_s=5)
    assert tale.core.next_deadline == 105
    assert tale.tell(QueueTick(), after_s=4) == []
    assert said(tale.tell(QueueTick(), after_s=1)) == [(1, Outcome.WAITING)]
    assert tale.core.next_deadline is None
    tale.put(1, 0, "a")
    assert tale.get(31, 1) == [(3, ["a"])]  # the same get, asked for again


def test_time_ends_a_put_that_gives_up_and_says_how_much_went_in() -> None:
    tale = story(2)
    tale.put(1, 0, *"abc", wait_s=5, is_last=True)
    tale.put(2, 0, "d")
    assert said(tale.tell(QueueTick(), after_s=5)) == [(1, (Outcome.FULL, 2))]
    assert tale.get(31, 1, 2) == [(3, ["a", "b"]), (2, in_(1))]
    assert tale.put(1, 0, *"abc") == [(4, (Outcome.FULL, 2))]  # asked for again, it is over all the same


def test_put_whose_time_passed_keeps_its_place_and_is_asked_for_again_without_items() -> None:
    tale = story(1)
    tale.put(1, 0, "a")
    tale.put(1, 1, "b", wait_s=5)
    tale.put(2, 0, "c")
    assert said(tale.tell(QueueTick(), after_s=5)) == [(2, (Outcome.WAITING, 0))]
    assert tale.tell(PutAsked(request_id=90, handle=1, number=1, below=0, items=None)) == []
    assert tale.get(31, 1) == [(4, ["a"]), (90, in_(1))]
    assert tale.get(31, 2) == [(5, ["b"]), (3, in_(1))]


def test_put_that_nobody_asks_for_goes_in_and_the_answer_is_kept() -> None:
    tale = story(1)
    tale.put(1, 0, "a")
    tale.put(1, 1, "b", wait_s=5)
    tale.tell(QueueTick(), after_s=5)
    assert tale.get(31, 1) == [(3, ["a"])]
    assert said(tale.tell(PutAsked(request_id=90, handle=1, number=1, below=0, items=None))) == [(90, in_(1))]
    assert tale.waiting == ["b"]


def test_put_asked_for_twice_goes_in_once(tale: Story) -> None:
    assert tale.put(1, 0, "a") == [(1, in_(1))]
    assert tale.put(1, 0, "a") == [(2, in_(1))]
    assert tale.waiting == ["a"]
    assert tale.put(1, 1, "b", below=1) == [(3, in_(1))]
    assert len(tale.core.state.handles[1].ended_puts) == 1  # the first was forgotten: its handle knows
    assert tale.put(1, 0, "a", below=0) == [(4, (Outcome.WAITING, 0))]  # a copy that was long on its way
    assert tale.waiting == ["a", "b"]


def test_puts_that_ended_out_of_order_are_forgotten_by_their_numbers() -> None:
    tale = story(size=1, is_durable=True)
    tale.put(1, 0, "a")
    tale.put(1, 1, "b")
    assert tale.put(1, 2, "c", wait_s=0, is_last=True) == [(3, (Outcome.FULL, 0))]
    assert tale.put(1, 3, "d", below=2) == [(2, (Outcome.FULL, 0))]  # the second was given up
    assert list(tale.core.state.handles[1].ended_puts) == [2] == [number for _, number in tale.journal.puts]


def test_put_that_was_given_up_is_dropped_with_the_next_one_and_what_waits_behind_it_goes_in() -> None:
    tale = story(size=2)
    tale.put(1, 1, "a")
    assert tale.put(1, 2, "b", "c", below=2) == []
    assert tale.put(2, 1, "d") == []
    assert tale.put(1, 3, "e", below=3) == [(2, (Outcome.FULL, 1))]
    assert tale.get(11, 1, 2) == [(5, ["a", "b"]), (3, in_(1)), (4, in_(1))]
    assert tale.waiting == ["d", "e"]


def test_put_asked_for_twice_while_it_waits_is_answered_to_the_second() -> None:
    tale = story(1)
    tale.put(1, 0, "a")
    tale.put(1, 1, "b")
    assert tale.put(1, 1, "b") == [(2, (Outcome.WAITING, 0))]
    assert tale.get(31, 1) == [(4, ["a"]), (3, in_(1))]


def test_get_asked_for_twice_is_given_the_same(tale: Story) -> None:
    tale.put(1, 0, "a", "b")
    assert tale.get(31, 1) == [(2, ["a"])]
    assert tale.get(31, 1) == [(3, ["a"])]
    assert tale.get(31, 2) == [(4, ["b"])]
    assert tale.get(31, 1) == [(5, Outcome.WAITING)]  # an old copy takes nothing


def test_get_that_was_given_up_and_is_asked_for_again_with_less_brings_less(tale: Story) -> None:
    tale.put(2, 1, "a", "b", "c")
    assert tale.get(11, 1, 3) == [(2, ["a", "b", "c"])]
    assert tale.get(31, 1, 5) == []
    assert tale.get(11, 1, 1, received=0) == [(4, ["a"]), (3, ["b", "c"])]
    assert tale.core.stats(tale.now).leased == 3


def test_get_asked_for_twice_while_it_waits_is_answered_to_the_second(tale: Story) -> None:
    tale.get(31, 1)
    assert tale.get(31, 1) == [(1, Outcome.WAITING)]
    assert tale.put(1, 0, "a")[1:] == [(2, ["a"])]


def test_lease_ends_with_the_next_take(tale: Story) -> None:
    tale.put(1, 0, "a", "b")
    tale.get(31, 1)
    assert tale.core.stats(tale.now).leased == 1
    tale.get(31, 2)
    assert tale.core.stats(tale.now).leased == 1
    tale.tell(IncarnationEnded(worker="w3", incarnation=0))
    assert tale.waiting == ["b"]


def test_threads_of_one_handle_are_consumers_of_their_own(tale: Story) -> None:
    tale.put(1, 0, "a", "b", "c")
    tale.get(31, 1)
    tale.get(32, 1)
    tale.get(32, 2)
    tale.tell(IncarnationEnded(worker="w3", incarnation=0))
    assert tale.waiting == ["a", "c"]


def test_take_that_never_arrived_comes_back_when_the_consumer_moves_on(tale: Story) -> None:
    tale.put(1, 0, "a", "b")
    tale.get(31, 1)
    assert tale.get(31, 2, 2, received=0) == [(3, ["a", "b"])]


def test_death_of_a_consumer_puts_what_it_had_in_front_in_order() -> None:
    tale = story(9)
    tale.put(1, 0, *"abcdef")
    tale.get(31, 1, 2)
    tale.get(21, 1, 2)
    tale.tell(IncarnationEnded(worker="w3", incarnation=0))
    assert tale.waiting == ["a", "b", "e", "f"]
    tale.tell(IncarnationEnded(worker="w2", incarnation=0))
    assert tale.waiting == ["a", "b", "c", "d", "e", "f"]


def test_death_gives_items_straight_to_those_who_wait(tale: Story) -> None:
    tale.put(1, 0, "a")
    tale.get(31, 1)
    tale.get(21, 1)
    assert said(tale.tell(IncarnationEnded(worker="w3", incarnation=0))) == [(3, ["a"])]


def test_items_that_come_back_may_go_beyond_the_bound_and_puts_wait() -> None:
    tale = story(1)
    tale.put(1, 0, "a")
    tale.get(31, 1)
    tale.put(1, 1, "b")
    tale.put(1, 2, "c")
    tale.tell(IncarnationEnded(worker="w3", incarnation=0))
    assert tale.waiting == ["a", "b"]
    tale.get(21, 1)
    assert tale.waiting == ["b"]
    tale.get(21, 2)
    assert tale.waiting == ["c"]


def test_death_of_a_producer_keeps_what_is_in_and_drops_the_rest() -> None:
    tale = story(2)
    tale.put(1, 0, *"abc")
    tale.put(2, 0, "d")
    assert said(tale.tell(IncarnationEnded(worker="w1", incarnation=0))) == [(1, (Outcome.UNKNOWN, 2))]
    assert tale.get(31, 1, 2) == [(3, ["a", "b"]), (2, in_(1))]


def test_dead_incarnation_cannot_come_back_and_its_next_can(tale: Story) -> None:
    tale.tell(IncarnationEnded(worker="w3", incarnation=0))
    assert tale.get(31, 1) == [(1, Outcome.UNKNOWN)]
    tale.attach(3, incarnation=0)
    assert tale.put(3, 0, "a") == [(2, (Outcome.UNKNOWN, 0))]
    tale.attach(4, worker="w3", incarnation=1)
    assert tale.put(4, 0, "a") == [(3, in_(1))]
    tale.tell(IncarnationEnded(worker="w3", incarnation=0))  # old news
    assert tale.get(41, 1) == [(4, ["a"])]


def test_new_incarnation_says_that_the_old_one_is_over(tale: Story) -> None:
    tale.put(1, 0, "a")
    tale.get(31, 1)
    tale.attach(4, worker="w3", incarnation=1)
    assert tale.waiting == ["a"]


def test_part_of_a_take_is_done(tale: Story) -> None:
    tale.put(1, 0, "a", "b", "c")
    tale.get(31, 1, 3)
    tale.done(31, 1, 1)
    tale.done(31, 1, 1)  # said twice
    tale.done(31, 0)  # of another take
    tale.tell(IncarnationEnded(worker="w3", incarnation=0))
    assert tale.waiting == ["b", "c"]


def test_take_is_returned_once(tale: Story) -> None:
    tale.put(1, 0, "a", "b")
    tale.get(31, 1)
    again = TakeReturned(handle=3, consumer=31, number=1, received=0)
    tale.tell(again)
    tale.tell(again)
    assert tale.waiting == ["a", "b"]
    assert tale.get(31, 2) == [(3, ["a"])]


def test_get_is_given_up_before_it_arrives(tale: Story) -> None:
    """It says all the same that the consumer is done with what it had before."""
    tale.put(1, 0, "a", "b")
    assert tale.get(31, 1) == [(2, ["a"])]
    tale.tell(TakeReturned(handle=3, consumer=31, number=2, received=1))
    assert tale.get(31, 2) == [(3, Outcome.WAITING)]
    assert tale.waiting == ["b"]
    assert tale.core.stats(tale.now).leased == 0


def test_consumer_that_ends_is_done_with_what_it_received(tale: Story) -> None:
    tale.put(1, 0, "a", "b")
    tale.get(31, 1)
    tale.get(32, 1)
    tale.tell(ConsumerEnded(handle=3, consumer=31, received=1))
    tale.tell(ConsumerEnded(handle=3, consumer=32, received=0))
    assert tale.waiting == ["b"]


def test_handle_that_closes_leaves_nothing() -> None:
    tale = story(1)
    tale.put(1, 0, "a")
    tale.put(1, 1, "b")
    tale.get(31, 1)
    tale.tell(HandleClosed(handle=3))
    tale.tell(HandleClosed(handle=3))
    assert (tale.waiting, set(tale.core.state.handles)) == (["a", "b"], {1, 2})


def test_closed_queue_takes_nothing_more_and_is_drained() -> None:
    tale = story(2)
    tale.put(1, 0, "a", "b", "c")
    assert said(tale.tell(CloseAsked())) == [(1, (Outcome.CLOSED, 2))]
    assert tale.tell(CloseAsked()) == []
    assert tale.put(1, 1, "d") == [(2, (Outcome.CLOSED, 0))]
    assert tale.get(31, 1, 5) == [(3, ["a", "b"])]
    assert tale.get(31, 2) == [(4, Outcome.CLOSED)]
    assert tale.core.is_finished


def test_closed_queue_ends_the_gets_that_wait(tale: Story) -> None:
    tale.get(31, 1)
    assert said(tale.tell(CloseAsked())) == [(1, Outcome.CLOSED)]


@pytest.mark.parametrize("dies", [False, True])
def test_closed_queue_waits_for_what_others_have(dies: bool, tale: Story) -> None:
    tale.put(1, 0, "a")
    tale.get(21, 1)
    tale.tell(CloseAsked())
    assert tale.get(31, 1) == []
    if dies:
        assert said(tale.tell(IncarnationEnded(worker="w2", incarnation=0))) == [(3, ["a"])]
    else:
        assert tale.done(21, 1) == [(3, Outcome.CLOSED)]


def test_statistics() -> None:
    tale = story(2)
    for number in range(5):
        tale.put(1, number, str(number))
    tale.get(31, 1)
    tale.now += 4
    tale.get(32, 1, 2)
    tale.get(33, 1, 9)
    tale.get(33, 2)
    stats = tale.core.stats(tale.now + 3)
    assert (stats.depth, stats.leased, stats.nbytes, stats.num_put, stats.num_taken) == (0, 3, 0, 5, 5)
    assert (stats.waiting_producers, stats.waiting_consumers, stats.handles) == (0, 1, 3)
    tale.get(33, 3)
    for number in range(5, 9):
        tale.put(1, number, str(number))
    stats = tale.core.stats(tale.now + 3)
    assert (stats.depth, stats.leased, stats.oldest_age_s) == (2, 4, 3)
    assert (stats.waiting_producers, stats.waiting_consumers) == (1, 0)


def test_rate_follows_what_happens() -> None:
    rate = Rate(0.0)
    assert rate.per_second(0.0) == 0
    for tick in range(600):
        rate.add(tick / 10, 5)
    assert rate.per_second(60.0) == pytest.approx(50, rel=0.1)
    assert rate.per_second(70.0) == pytest.approx(50 / 2.718, rel=0.1)
    assert rate.per_second(3600.0) == pytest.approx(0, abs=0.01)
    rate.add(3600.0, 10)
    assert rate.per_second(3600.5) == pytest.approx(1, rel=0.1)
    assert rate.total == 3010


def test_owner_starts_again_with_leases_puts_and_order() -> None:
    tale = story(4, is_durable=True)
    tale.put(1, 0, *"abcd")
    tale.get(31, 1, 2)
    tale.get(21, 1, 1)
    tale.tell(IncarnationEnded(worker="w2", incarnation=0))
    tale.done(31, 1, 1)
    tale.put(1, 1, *"efgh")
    assert tale.waiting == ["c", "d", "e", "f"]
    tale.restart()
    assert tale.waiting == ["c", "d", "e", "f"]
    assert tale.get(31, 1) == [(5, ["b"])]  # still on lease, and given again to whom it was given
    assert tale.put(1, 0, *"abcd") == [(6, in_(4))]
    assert tale.put(1, 1, *"efgh") == []  # the first two of it are in
    tale.tell(IncarnationEnded(worker="w3", incarnation=0))
    tale.attach(4)
    assert tale.get(41, 1, 3)[0] == (8, ["b", "c", "d"])
    assert tale.get(41, 2, 3)[0] == (9, ["e", "f", "g"])
    assert tale.get(41, 3, 3) == [(10, ["h"])]


def test_owner_that_starts_again_asks_for_the_items_of_a_put_it_never_had() -> None:
    tale = story(1, is_durable=True)
    tale.put(1, 0, "a")
    tale.put(1, 1, "b")
    tale.restart()
    assert said(tale.tell(PutAsked(request_id=90, handle=1, number=1, below=0, items=None))) == [
        (90, (Outcome.UNKNOWN, 0))
    ]


def test_closed_stays_closed_over_a_restart() -> None:
    tale = story(is_durable=True)
    tale.put(1, 0, "a")
    tale.tell(CloseAsked())
    tale.restart()
    assert tale.put(1, 1, "b") == [(2, (Outcome.CLOSED, 0))]
    assert tale.get(31, 1) == [(3, ["a"])]
    assert tale.get(31, 2) == [(4, Outcome.CLOSED)]
