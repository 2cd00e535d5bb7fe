"""A put that its producer gives up while it waits for room: the owner hears of it, once, and is asked no more."""

import threading
from typing import Any

import pytest

from tests.support.queue_members import DEADLINE_S, QueueWorld
from unified.queue import producer

NUM_ASKED = 10


@pytest.mark.parametrize("who", ["owner", "other"])
def test_a_cancelled_put_is_not_asked_for_again(world: QueueWorld, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer, "SLICE_S", 0.05)
    members = {name: world.worker(name) for name in ("owner", "other")}
    mine = members["owner"].queue(is_master=True, size=1)
    ours = members[who].queue()
    ours.put("full")
    endpoint: Any = ours._lookup.endpoint
    put, asked = endpoint.put, threading.Semaphore(0)
    numbers: list[int] = []

    def noted(question: Any, *options: Any) -> Any:
        numbers.append(question[1])
        asked.release()
        return put(question, *options)

    endpoint.put = noted
    given_up, kept = ours.put_async("given up"), ours.put_async("kept")
    given_up.cancel()
    before = len(numbers)
    for _ in range(before + NUM_ASKED):
        assert asked.acquire(timeout=DEADLINE_S)
    assert numbers[before:].count(1) <= 1, "on its way when it was given up"
    assert mine.stats().waiting_producers == 1
    assert [mine.get(1), mine.get(1)] == [["full"], ["kept"]]
    kept.result(DEADLINE_S)
