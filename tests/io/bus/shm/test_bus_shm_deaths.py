"""Shared memory and the dead: no slot is lost to a killed reader, no file to a killed owner, and no reader its data."""

import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.shared_memory import Side, names, peers, run_code
from unified import process
from unified.bus.shm import reader as reader_module
from unified.bus.shm.files import GRACE_S, YOUNG_S, Sweeper, first_words, is_alive, own_mark, segment_name
from unified.bus.shm.layout import CLOSED_WORD, HEADER_BYTES, NAMESPACE_WORD
from unified.bus.shm.reader import SharedSegment
from unified.bus.shm.segment import Segment
from unified.errors import ProtocolError

pytestmark = pytest.mark.processes

NBYTES = 300_000
LATER_S = 5.0


def ones(item: int = 1) -> np.ndarray:
    return np.full(NBYTES, item, "u1")


def test_a_slot_that_a_killed_reader_had_is_used_again(directory: str, owner: Side) -> None:
    with peers(directory, "reader") as [reader]:
        reader.receive("owner", *owner.send(ones(), "reader")[:2])
        reader.kill()
        now = time.monotonic()
        owner.pool.trim(now + LATER_S)
        owner.send(ones(), "owner")
        assert names(directory) == [segment_name("owner", 0)]
    owner.pool.forget("owner")


def test_memory_is_given_back_while_messages_go_on(
    directory: str, owner: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can take a second, and every message with shared memory takes these locks."""
    reader = Side(directory, "reader")
    was_free: list[bool] = []

    class Watched(SharedSegment):
        def __del__(self) -> None:
            was_free.append(reader.reader._lock.acquire(False))
            if was_free[-1]:
                reader.reader._lock.release()

    def remove(segment: Segment) -> None:
        was_free.append(owner.pool._lock.acquire(False))
        if was_free[-1]:
            owner.pool._lock.release()
        really_remove(segment)

    really_remove = Segment.remove
    monkeypatch.setattr(reader_module, "SharedSegment", Watched)
    monkeypatch.setattr(Segment, "remove", remove)

    def receive() -> None:
        _, shared, frames = owner.send(ones(), "reader")
        reader.reader.borrow("owner", shared or [], frames)

    later = time.monotonic() + 60
    receive()
    reader.reader.forget("owner")
    assert was_free.pop() is True
    receive()
    reader.reader.trim(later)
    assert was_free.pop() is True
    receive()
    owner.pool.trim(later)  # finds it idle
    owner.pool.trim(2 * later)
    assert was_free.pop() is True
    reader.reader.close()
    assert was_free.pop() is True
    assert not was_free


def test_a_killed_readers_slot_is_found_when_the_quota_is_in_use(directory: str) -> None:
    side = Side(directory, "tight")
    side.pool = type(side.pool)("tight", directory=directory, quota_bytes=1024 * 1024)
    with peers(directory, "reader") as [reader]:
        exported = side.send(np.zeros(600_000, "u1"), "reader")
        reader.receive("tight", *exported[:2])
        assert side.pool.export([bytes(600_000)]) is None
        reader.kill()
        assert side.pool.export([bytes(600_000)]) is None, "looked for not long ago"
        side.pool.trim(time.monotonic() + LATER_S)
        assert side.pool.export([bytes(600_000)]) is not None
    side.pool.close()


def test_a_slot_on_its_way_to_a_dead_reader_is_given_up(directory: str, owner: Side) -> None:
    body, shared, _ = owner.send(ones(), "reader")
    owner.pool.forget("reader")
    owner.pool.trim(time.monotonic())
    assert names(directory) == []
    with pytest.raises(ProtocolError):
        owner.receive("owner", body, shared)
    owner.receive("owner", *owner.send(ones(), "owner")[:2])
    assert names(directory) == [segment_name("owner", 1)]


def test_a_reader_that_was_taken_for_dead_is_told_and_keeps_what_it_reads(directory: str, owner: Side) -> None:
    held = owner.receive("owner", *owner.send(ones(7), "reader")[:2])
    body, shared, _ = owner.send(ones(8), "reader")
    owner.pool.forget("reader")
    with pytest.raises(ProtocolError, match="took this process for dead"):
        owner.receive("owner", body, shared)
    for item in range(5):
        owner.receive("owner", *owner.send(ones(item), "owner")[:2])
        owner.pool.trim(time.monotonic())
    assert held.sum() == 7 * NBYTES


def test_what_was_being_handed_on_to_the_dead_is_given_up_by_its_owner(directory: str, owner: Side) -> None:
    middle = Side(directory, "middle")
    array = middle.receive("owner", *owner.send(ones(), "middle")[:2])
    middle.send(array, "reader")
    del array
    owner.pool.trim(time.monotonic() + LATER_S)
    assert names(directory) == [segment_name("owner", 0)], "the reader may still take it up"
    middle.pool.forget("reader")
    owner.pool.trim(time.monotonic() + 2 * LATER_S)
    assert names(directory) == []
    assert not middle.pool.trim(0.0)


def test_the_death_of_who_handed_it_on_is_its_owners_to_clear_away(directory: str, owner: Side) -> None:
    with peers(directory, "middle") as [middle]:
        middle.receive("owner", *owner.send(ones(), "middle")[:2])
        assert middle.ask("hand-on", "reader")
        middle.ask("drop")
        middle.kill()
        owner.pool.trim(time.monotonic() + LATER_S)
        assert names(directory) == [segment_name("owner", 0)]
        owner.pool.forget("middle")
        owner.pool.trim(time.monotonic() + 2 * LATER_S)
        assert names(directory) == []


def test_data_outlives_its_killed_owner_and_goes_with_its_last_reader(directory: str, owner: Side) -> None:
    with peers(directory, "dead") as [dead]:
        body, shared = dead.send(NBYTES, 3, "owner")
        array = owner.receive("dead", body, shared)
        dead.kill()
        sweeper = Sweeper(directory)
        assert sweeper.sweep(0.0, time.time()) == []
        assert sweeper.sweep(100 * GRACE_S, time.time(), is_last=True) == [], "it is read here"
        assert sweeper.due_at == 101 * GRACE_S
        assert array.sum() == 3 * NBYTES
        owner.reader.forget("dead")
        with peers(directory, "late") as [late]:
            body, shared_on, _ = owner.send(array, "late")
            assert owner.pool._table.total_bytes == 0
            assert late.receive("owner", body, shared_on) == 3 * NBYTES, "it can still be handed on"
            del array
            assert names(directory) == [segment_name("dead", 0)]
            late.ask("forget", "dead")
            late.ask("drop")
            assert names(directory) == []


def test_who_is_only_taken_for_dead_keeps_its_files(directory: str, owner: Side) -> None:
    with peers(directory, "alive") as [alive]:
        body, shared = alive.send(NBYTES, 3, "owner")
        array = owner.receive("alive", body, shared)
        owner.reader.forget("alive")
        del array
        assert names(directory) == [segment_name("alive", 0)]
        body, shared = alive.send(NBYTES, 4, "owner")
        assert owner.receive("alive", body, shared).sum() == 4 * NBYTES


def test_data_outlives_its_owners_orderly_end(directory: str, owner: Side) -> None:
    with peers(directory, "leaving") as [leaving]:
        read = owner.receive("leaving", *leaving.send(NBYTES, 3, "owner"))
        late = leaving.send(NBYTES, 4, "owner")
        leaving.send(NBYTES, 5, "nobody")
        leaving.ask("close")
        leaving.kill()
        assert owner.receive("leaving", *late).sum() == 4 * NBYTES, "it was on its way"
        assert read.sum() == 3 * NBYTES
        del read
        assert names(directory) == [segment_name("leaving", 2)]
        sweeper = Sweeper(directory)
        assert sweeper.sweep(0.0, time.time()) == []
        assert sweeper.sweep(GRACE_S - 1, time.time()) == [], "it may be on its way to nobody yet"
        assert sweeper.due_at == GRACE_S
        assert sweeper.sweep(GRACE_S, time.time()) == [segment_name("leaving", 2)]
        assert sweeper.due_at is None


def test_a_pool_that_is_closed_leaves_nothing(directory: str, owner: Side) -> None:
    owner.receive("owner", *owner.send(ones(), "owner")[:2])
    exported = owner.pool.export([bytes(NBYTES)])
    owner.pool.close()
    assert names(directory) == []
    assert owner.pool.export([bytes(NBYTES)]) is None
    assert exported is not None
    exported.release()
    assert not owner.pool.trim(0.0)


def test_a_sweep_takes_only_what_the_dead_left(directory: str, owner: Side) -> None:
    owner.receive("owner", *owner.send(ones(), "owner")[:2])
    folder = Path(directory)
    dead = first_words(own_mark() + (1 << 22))  # our pid, and another start
    (folder / "unified-dead-0").write_bytes(dead)
    (folder / "unified-spoken-for-0").write_bytes(dead)
    (folder / "unified-young-0").write_bytes(b"")
    (folder / "unified-dead-x").write_bytes(dead)
    (folder / "unified-dead").write_bytes(dead)
    (folder / "other-dead-0").write_bytes(dead)
    far = bytearray(dead)
    far[8 * NAMESPACE_WORD] ^= 1
    (folder / "unified-far-0").write_bytes(far)
    closed = bytearray(first_words(own_mark()))
    closed[8 * CLOSED_WORD] = 1
    (folder / "unified-closed-0").write_bytes(closed)
    (folder / "unified-link-0").symlink_to(folder / "other-dead-0")
    before = set(names(directory))
    sweeper = Sweeper(directory)
    removed = sweeper.sweep(0.0, time.time(), living={"spoken-for"})
    assert removed == ["unified-closed-0", "unified-dead-0"]
    assert set(names(directory)) == before - set(removed)
    assert sweeper.sweep(0.0, time.time() + YOUNG_S + 1, living={"spoken-for"}) == ["unified-young-0"]
    assert Sweeper(directory + "/missing").sweep(0.0, 0.0) == []
    assert len(dead) == HEADER_BYTES


def test_a_mark_is_of_one_process() -> None:
    assert is_alive(own_mark())
    assert not is_alive(own_mark() + (1 << 22))
    child = subprocess.Popen(["true"])
    found = process.facts(child.pid)
    child.wait()
    assert found is None or not is_alive(found.start_ticks << 22 | child.pid)


FORK = """
import gc, os, sys
import numpy as np
from tests.support.shared_memory import Side

directory = sys.argv[1]
side = Side(directory, "owner")
held = side.receive("owner", *side.send(np.full(300_000, 5, "u1"), "owner")[:2])
child = os.fork()
if child == 0:
    total = int(held.sum())
    exported = side.pool.export([bytes(300_000)])
    side.pool.forget("owner")
    side.pool.close()
    side.reader.close()
    del held
    gc.collect()
    os._exit(0 if exported is None and total == 1_500_000 else 1)
assert os.waitpid(child, 0)[1] == 0
for item in range(3):
    side.send(np.full(300_000, item, "u1"), "reader")
assert held.sum() == 1_500_000, "the fork gave the reference back"
assert len(os.listdir(directory)) == 4, os.listdir(directory)
side.pool.forget("reader")
del held
side.pool.close()
assert not os.listdir(directory)
"""


def test_a_fork_takes_nothing_from_its_parent(directory: str) -> None:
    run_code(FORK, directory)


KEEP = """
import sys
import numpy as np
from tests.support.shared_memory import Side

side = Side(sys.argv[1], "leaving")
held = side.receive("leaving", *side.send(np.zeros(300_000, "u1"), "leaving")[:2])
other = side.receive("leaving", *side.send(np.zeros(300_000, "u1"), "leaving")[:2])
sys.held = held  # nothing collects it
"""


@pytest.mark.parametrize("end", ["", "side.pool.close()"])
def test_a_process_that_ends_while_it_reads_leaves_nothing(directory: str, end: str) -> None:
    run_code(KEEP + end, directory)
    assert names(directory) == []
