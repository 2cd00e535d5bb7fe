"""The queue of saves: bounded, in order, the newest wins, each save ends in exactly one way."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unified.checkpoint.save_queue import QueuedSave, SaveQueue, WhenFull
from unified.core.backoff import Backoff
from unified.errors import InvariantError


def make_queue(when_full: WhenFull = "newest", max_waiting: int = 2) -> SaveQueue[int]:
    return SaveQueue(
        max_waiting=max_waiting, max_waiting_bytes=10, when_full=when_full, max_tries=3, backoff=Backoff(first_s=1.0)
    )


def test_the_oldest_waiting_save_gives_way_and_the_one_being_written_does_not() -> None:
    queue = make_queue()
    saves = [QueuedSave(step, 1, step) for step in range(4)]
    queue.offer(saves[0])
    assert queue.next() is saves[0]
    assert [queue.offer(save) for save in saves[1:]] == [[], [], [saves[1]]]
    queue.succeeded()
    assert queue.steps == [2, 3]


def test_bytes_are_bounded_but_one_save_of_any_size_may_wait() -> None:
    queue = make_queue()
    small, large = QueuedSave(1, 4, 1), QueuedSave(2, 1000, 2)
    queue.offer(small)
    assert queue.offer(large) == [small]
    assert queue.waiting_bytes == 1000


def test_a_save_of_the_same_step_takes_the_place_of_the_one_that_waits() -> None:
    queue = make_queue("wait")
    first, second = QueuedSave(1, 1, 1), QueuedSave(1, 1, 2)
    queue.offer(first)
    assert queue.offer(second) == [first]
    assert queue.next() is second


def test_with_wait_there_is_no_room_until_one_is_begun() -> None:
    queue = make_queue("wait", max_waiting=1)
    queue.offer(QueuedSave(1, 1, 1))
    assert not queue.has_room(1)
    queue.next()
    assert queue.has_room(1)


def test_a_failed_save_is_tried_again_later_and_later_and_then_reported_once() -> None:
    queue = make_queue()
    queue.offer(QueuedSave(7, 1, 7))
    error = OSError("full")
    for now, try_at in ((0.0, 1.0), (1.0, 3.0)):
        assert queue.next() is not None
        assert queue.failed(now, error)
        assert queue.try_at == try_at
    assert not queue.failed(3.0, error)
    assert [(each.step, each.num_tries, each.error) for each in queue.take_failures()] == [(7, 3, error)]
    assert queue.take_failures() == []
    assert queue.steps == []


def test_a_final_failure_is_not_tried_again() -> None:
    queue = make_queue()
    queue.offer(QueuedSave(7, 1, 7))
    queue.next()
    assert not queue.failed(0.0, PermissionError("no"), is_final=True)
    assert queue.steps == []


def test_an_end_without_a_beginning_is_refused() -> None:
    with pytest.raises(InvariantError):
        make_queue().succeeded()
    with pytest.raises(InvariantError):
        make_queue().failed(0.0, OSError())


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(["offer", "next", "ok", "fail"]), st.integers(0, 5), st.integers(0, 12))),
    st.sampled_from(["newest", "wait"]),
    st.integers(0, 3),
)
def test_every_save_ends_in_exactly_one_way(
    moves: list[tuple[str, int, int]], when_full: WhenFull, max_waiting: int
) -> None:
    queue = make_queue(when_full, max_waiting)
    offered: list[int] = []
    saved: list[int] = []
    given_way: list[int] = []
    failed: list[int] = []
    for move, step, nbytes in moves:
        current = queue.next() if move != "offer" else None
        if move == "offer" and queue.has_room(nbytes):
            offered.append(len(offered))
            given_way += [save.item for save in queue.offer(QueuedSave(step, nbytes, offered[-1]))]
            assert offered[-1] not in given_way
        elif move == "ok" and current is not None:
            queue.succeeded()
            saved.append(current.item)
        elif move == "fail" and current is not None and not queue.failed(0.0, OSError()):
            failed.append(current.item)
        assert queue.check() == []
    newest_is_lost = bool(offered) and offered[-1] in given_way
    assert not newest_is_lost
    while (left := queue.next()) is not None:
        queue.succeeded()
        saved.append(left.item)
    assert sorted(saved + given_way + failed) == offered
    assert saved == sorted(saved)
    assert len(queue.take_failures()) == len(failed)
