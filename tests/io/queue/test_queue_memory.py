"""What a queue takes of its owner's memory: what lies in shared memory stays there, and the owner only knows where."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.queue_members import DEADLINE_S, QueueWorld
from tests.support.queue_owner import Own, OwnerProcess
from unified.bus.shm.pool import default_limit

MIB = 1024 * 1024
NUM_ITEMS = 16
ITEM_BYTES = 4 * MIB
on_one_host = pytest.mark.parametrize("world", ["auto"], indirect=True)


@pytest.fixture
def owner(own: Own) -> OwnerProcess:
    return own(size=NUM_ITEMS)


def own_bytes(process: OwnerProcess) -> int:
    lines = Path(f"/proc/{process.popen.pid}/status").read_text().splitlines()
    [kilobytes] = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return int(kilobytes) * 1024


def item(number: int) -> np.ndarray:
    return np.full(ITEM_BYTES, number, "u1")


@on_one_host
def test_the_owner_does_not_hold_what_lies_in_shared_memory(world: QueueWorld, owner: OwnerProcess) -> None:
    if default_limit() < 2 * NUM_ITEMS * ITEM_BYTES:
        pytest.skip(f"a process may hold only {default_limit()} bytes of shared memory here")
    theirs, ours = world.worker("producer").queue(), world.worker("consumer").queue()
    theirs.put(item(0))  # with the first one the owner loads what it needs
    assert ours.get(1, timeout=DEADLINE_S)[0].nbytes == ITEM_BYTES
    ours.task_done()
    before = own_bytes(owner)
    for number in range(NUM_ITEMS):
        theirs.put(item(number), timeout=DEADLINE_S)
    assert ours.qsize() == NUM_ITEMS
    assert own_bytes(owner) - before < 8 * MIB
    got = ours.get(NUM_ITEMS, timeout=DEADLINE_S)
    assert own_bytes(owner) - before < 8 * MIB
    assert [(each.min(), each.max(), each.nbytes) for each in got] == [
        (number, number, ITEM_BYTES) for number in range(NUM_ITEMS)
    ]
