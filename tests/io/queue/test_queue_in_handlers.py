"""Handlers that wait for a queue of their own worker: they keep no others from running, which they may wait for."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.queue_members import DEADLINE_S, QueueWorld
from unified.bus.calls.server import MAX_HANDLER_THREADS
from unified.testing import eventually

on_one_route = pytest.mark.parametrize("world", ["auto"], indirect=True)


@on_one_route
@pytest.mark.parametrize("durable", [False, True])
def test_handlers_that_wait_for_items_leave_room_for_one_that_puts(
    world: QueueWorld, tmp_path: Path, durable: bool
) -> None:
    owner, other = world.worker("owner"), world.worker("other")
    options: dict[str, Any] = {"durable": True, "path": tmp_path / "q.sqlite"} if durable else {}
    mine = owner.queue(is_master=True, **options)

    def take() -> int:
        [item] = mine.get(1, DEADLINE_S)
        mine.task_done()
        return int(item)

    owner.bus.registry["take"] = take
    owner.bus.registry["put"] = mine.put
    takes = [other.bus.call("owner", "take", (), {}) for _ in range(MAX_HANDLER_THREADS)]
    assert eventually(lambda: mine.stats().waiting_consumers == MAX_HANDLER_THREADS)
    for number in range(MAX_HANDLER_THREADS):
        other.bus.call("owner", "put", (number,), {}, timeout=DEADLINE_S).result()
    assert sorted(each.result(DEADLINE_S) for each in takes) == list(range(MAX_HANDLER_THREADS))


@on_one_route
def test_handlers_that_wait_for_room_leave_some_for_one_that_takes(world: QueueWorld) -> None:
    owner, other = world.worker("owner"), world.worker("other")
    mine = owner.queue(is_master=True, size=1)
    mine.put(-1)
    owner.bus.registry["put"] = lambda number: mine.put(number, timeout=DEADLINE_S)
    owner.bus.registry["take"] = lambda: mine.get(1, DEADLINE_S)
    puts = [other.bus.call("owner", "put", (number,), {}) for number in range(MAX_HANDLER_THREADS)]
    assert eventually(lambda: mine.stats().waiting_producers == MAX_HANDLER_THREADS)
    taken: list[int] = []
    for _ in range(MAX_HANDLER_THREADS + 1):
        taken += other.bus.call("owner", "take", (), {}, timeout=DEADLINE_S).result()
    assert sorted(taken) == list(range(-1, MAX_HANDLER_THREADS))
    for each in puts:
        each.result(DEADLINE_S)
