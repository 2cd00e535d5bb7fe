"""Shared memory that cannot be had: payloads go by the wire, one line says why, and nothing breaks or is left."""

import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.bus import DEADLINE_S, World, entry
from tests.support.weights import one_route
from unified.bus.shm.files import DIRECTORY, inbox_of
from unified.bus.shm.pool import LIMIT_VARIABLE, SharedPool, default_limit
from unified.bus.shm.reader import SharedReader, borrowed_behind
from unified.bus.shm.segment import Segment
from unified.bus.transport.unix_connection import UnixConnection
from unified.errors import UsageError

MIB = 1024 * 1024


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[str]:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(tmp_path)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting needs root: {mounted.stderr.strip()}")
    yield str(tmp_path)
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)  # the traceback of a failed test may hold a mapping


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def segments_of(*inbox_ids: str) -> list[str]:
    return [name for name in os.listdir(DIRECTORY) if inbox_of(name) in inbox_ids]


def test_the_quota_leaves_the_rest_to_the_wire_and_says_so_once(
    directory: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = SharedPool("inbox", directory=directory, quota_bytes=4 * MIB)
    first = pool.export([bytes(3 * MIB)])
    assert first is not None
    assert pool.export([bytes(3 * MIB)]) is None
    assert pool.export([bytes(30 * MIB)]) is None
    small = pool.export([bytes(MIB)])
    assert small is not None, "what fits is still had"
    [warning] = warnings(caplog)
    assert "the quota of 4194304 bytes is in use" in warning
    assert LIMIT_VARIABLE in warning
    first.release()
    small.release()
    assert pool.export([bytes(4 * MIB)]) is not None, "idle slots make room"
    assert pool._table.total_bytes == 4 * MIB
    pool.close()
    assert not os.listdir(directory)


def test_a_quota_of_nothing_is_no_pool(directory: str, caplog: pytest.LogCaptureFixture) -> None:
    pool = SharedPool("inbox", directory=directory, quota_bytes=0)
    assert pool.export([bytes(MIB)]) is None
    assert not pool.trim(0.0)
    pool.close()
    assert not warnings(caplog)


def test_a_full_mount_is_left_to_the_wire(tiny: str, caplog: pytest.LogCaptureFixture) -> None:
    pool = SharedPool("inbox", directory=tiny, quota_bytes=100 * MIB)
    assert pool.export([bytes(8 * MIB)]) is None
    assert not os.listdir(tiny)
    [warning] = warnings(caplog)
    assert tiny in warning
    assert "room" in warning
    pool.close()


def test_memory_that_the_mount_promises_and_has_not_is_found_out_before_it_is_touched(tiny: str) -> None:
    with pytest.raises(OSError, match="No space left"):
        Segment(tiny, "inbox", 0, 8 * MIB, mark=1)
    assert not os.listdir(tiny)


def test_a_mount_with_room_again_is_used_again(tiny: str) -> None:
    filler = Path(tiny, "filler")
    filler.write_bytes(bytes(5 * MIB))
    pool = SharedPool("inbox", directory=tiny, quota_bytes=100 * MIB)
    assert pool.export([bytes(2 * MIB)]) is None
    pool._refused_until = 0.0
    assert pool.allocate(2 * MIB) is None, "nor is there room to make something in"
    filler.unlink()
    assert pool.export([bytes(2 * MIB)]) is None, "it is not asked at every message"
    pool._refused_until = 0.0
    exported = pool.export([b"x" * (2 * MIB)])
    assert exported is not None
    reader = SharedReader(tiny)
    [view] = reader.borrow("inbox", pool.grant(exported, "reader").shared or [], [])
    assert bytes(view) == b"x" * (2 * MIB)
    del view
    exported.release()
    pool.close()
    reader.close()
    assert not os.listdir(tiny)


def test_no_such_directory_is_left_to_the_wire(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    missing = str(tmp_path / "missing")
    pool = SharedPool("inbox", directory=missing, quota_bytes=100 * MIB)
    assert pool.export([bytes(2 * MIB)]) is None
    assert len(warnings(caplog)) == 1
    pool.close()
    assert default_limit(missing, {}) == 0
    assert SharedPool("inbox", directory=missing).export([bytes(2 * MIB)]) is None


def test_the_limit_is_a_share_of_the_mount_or_what_the_user_says(tiny: str) -> None:
    assert default_limit(tiny, {}) == 6 * MIB // 4
    assert default_limit(tiny, {LIMIT_VARIABLE: "0"}) == 0
    assert default_limit(tiny, {LIMIT_VARIABLE: "123"}) == 123
    with pytest.raises(UsageError, match=r"UNIFIED_SHM_LIMIT='1GB' is not a number of bytes"):
        default_limit(tiny, {LIMIT_VARIABLE: "1GB"})


@one_route
def test_calls_of_this_host_do_without_shared_memory(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "0")
    held: list[np.ndarray] = []

    def keep_and_make(array: np.ndarray) -> np.ndarray:
        held.append(array)
        return array[::-1] + 1

    a, b = world.pair({"keep_and_make": keep_and_make})
    assert isinstance(a._connections.connection(b._listeners.inbox), UnixConnection)
    array = np.arange(4 * MIB // 8)
    result = a.call("b", "keep_and_make", (array,), {}).result(DEADLINE_S)
    assert segments_of(a.inbox_id, b.inbox_id) == []
    assert np.array_equal(held[0], array)
    assert np.array_equal(result, array[::-1] + 1)
    process = world.process("c")
    a.update_directory([entry("c", process.inbox)])
    echo = a.call("c", "echo", (array,), {}).result(DEADLINE_S)
    assert segments_of(a.inbox_id, process.inbox.inbox_id) == []
    assert np.array_equal(echo, array)


@one_route
def test_a_call_that_finds_the_limit_in_use_goes_by_the_wire(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, str(6 * MIB))
    held: list[np.ndarray] = []
    a, b = world.pair({"keep": held.append, "make": lambda number: np.full(4 * MIB, number, "u1")})
    for number in (1, 2):
        a.call("b", "keep", (np.full(4 * MIB, number, "u1"),), {}).result(DEADLINE_S)
    made = [a.call("b", "make", (number,), {}).result(DEADLINE_S) for number in (3, 4)]
    arrays = [*held, *made]
    assert [borrowed_behind(memoryview(array)) is not None for array in arrays] == [True, False] * 2
    assert sorted(segments_of(a.inbox_id, b.inbox_id)) == sorted(f"unified-{each.inbox_id}-0" for each in (a, b))
    assert [(array.min(), array.max(), array.nbytes) for array in arrays] == [(n, n, 4 * MIB) for n in (1, 2, 3, 4)]
