"""How soon a put that waits for room returns once there is some: about as soon as a call is answered."""

import statistics
import threading
import time

import pytest

from tests.support.queue_members import Member, QueueWorld
from tests.support.queue_owner import Own, OwnerProcess
from unified.testing import eventually

NUM_PUTS = 100
MANY_CALLS = 10
"""It takes two messages, as a call does, and wakes two threads of two workers, here both in this one process."""


@pytest.fixture
def owner(own: Own) -> OwnerProcess:
    return own(size=1)


def test_a_blocked_put_wakes_at_once(world: QueueWorld, owner: OwnerProcess) -> None:
    """Not at the end of some interval, however short."""
    producer, consumer = world.worker("producer"), world.worker("consumer")
    theirs, ours = producer.queue(), consumer.queue()
    returned: list[float] = []

    def put_all() -> None:
        for number in range(1, NUM_PUTS + 1):
            theirs.put(number)
            returned.append(time.monotonic())

    theirs.put(0)
    thread = threading.Thread(target=put_all)
    thread.start()
    wakes, calls = [], []
    for number in range(NUM_PUTS):
        calls.append(seconds_of_a_call(consumer))
        eventually(lambda: ours.stats().waiting_producers == 1)
        begun = time.monotonic()
        assert ours.get(1) == [number]
        eventually(lambda number=number: len(returned) > number)  # type: ignore[misc]
        wakes.append(returned[number] - begun)
    thread.join()
    wake, call = statistics.median(wakes), statistics.median(calls)
    print(
        f"{world.route}: a put returned {wake * 1e6:.0f} µs after the get that made room; a call: {call * 1e6:.0f} µs"
    )
    assert wake < MANY_CALLS * call


def seconds_of_a_call(member: Member) -> float:
    begun = time.monotonic()
    member.bus.call("owner", "nothing", (), {}).result()
    return time.monotonic() - begun
