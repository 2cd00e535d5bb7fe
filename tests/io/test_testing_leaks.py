"""What `unified.testing` notices, without any cluster."""

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.deadlines import missed
from unified import testing
from unified.testing import SHARED_MEMORY, Belongings, eventually, left_behind


def test_nothing_new_is_nothing_left() -> None:
    assert left_behind(Belongings()) == []


def test_a_descriptor_a_thread_and_shared_memory_are_noticed() -> None:
    before = Belongings()
    reading, writing = os.pipe()
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="forgotten")
    thread.start()
    shared = SHARED_MEMORY / f"unified-test-{os.getpid()}"
    shared.touch()
    try:
        left = left_behind(before, settle_s=0.0)
        assert f"thread {thread.name}" in left
        assert str(shared) in left
        assert sum(thing.startswith("descriptor") for thing in left) == 2
    finally:
        done.set()
        thread.join()
        shared.unlink()
        os.close(reading)
        os.close(writing)
    assert left_behind(before) == []


def test_what_ends_in_a_moment_is_not_left() -> None:
    before = Belongings()
    threading.Timer(0.1, lambda: None).start()
    assert left_behind(before) == []


def test_shared_memory_of_a_program_that_runs_beside_is_not_ours() -> None:
    before = Belongings()
    shared = SHARED_MEMORY / f"unified-test-other-{os.getpid()}"
    script = (
        "import mmap, sys; f = open(sys.argv[1], 'wb+'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096); "
        "print('mapped', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(shared)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"mapped\n"
        left = left_behind(before, settle_s=0.0)
        assert not [thing for thing in left if str(shared) in thing]
    try:
        assert str(shared) in left_behind(before, settle_s=0.0)
    finally:
        shared.unlink()


def test_a_semaphore_of_a_program_that_runs_beside_is_not_ours() -> None:
    """It is mapped under the name that glibc made it with, and not the one it has."""
    before = Belongings()
    script = (
        "import multiprocessing as mp, sys; lock = mp.get_context('spawn').Lock(); "
        "print(lock._semlock.name, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        name = f"sem.{other.stdout.readline().decode().strip().removeprefix('/')}"
        assert (SHARED_MEMORY / name).exists()
        assert not [thing for thing in left_behind(before, settle_s=0.0) if name in thing]


def test_shared_memory_that_its_owner_removes_while_the_check_looks_is_not_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine a look at all processes takes seconds, and programs beside the test end meanwhile."""
    before = Belongings()
    shared = [SHARED_MEMORY / f"unified-test-ends-{os.getpid()}-{number}" for number in range(2)]
    for path in shared:
        path.touch()
    now, listdir = Belongings(), os.listdir

    def end_of_owner(folder: str) -> list[str]:
        if folder == "/proc":
            for path in shared:
                path.unlink(missing_ok=True)
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", end_of_owner)
    assert [thing for thing in now.left_since(before) if "unified-test-ends" in thing] == []


class Checks:
    """`Belongings` of checks that each take `seconds`, and what the first, second, … find left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float, *found: list[str]) -> None:
        self.now = 0.0
        self._seconds = seconds
        self._found = [*found]
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=time.sleep)
        monkeypatch.setattr(testing, "time", clock)
        monkeypatch.setattr(testing, "Belongings", lambda: self)

    def left_since(self, before: Any) -> list[str]:
        self.now += self._seconds
        return self._found.pop(0) if len(self._found) > 1 else self._found[0]


def test_no_check_that_takes_longer_than_the_wait_decides_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before: Any = Checks(monkeypatch, 100.0, ["file of another test's worker, which just ended"], [])
    assert left_behind(before) == []


def test_what_is_left_for_a_moment_each_time_is_not_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    before: Any = Checks(monkeypatch, 7.0, *([f"file {number}", "ours"] for number in range(30)))
    assert left_behind(before) == ["ours"]
    before = Checks(monkeypatch, 7.0, *([f"file {number}"] for number in range(30)))
    assert left_behind(before) == []


def test_eventually_returns_what_came_true_and_says_what_did_not() -> None:
    values = iter([0, None, 7])
    assert eventually(lambda: next(values)) == 7
    with pytest.raises(AssertionError, match=r"it never rained \(waited 0\.02 s; last: False\)"):
        eventually(lambda: False, timeout=missed(0.02), message="it never rained")


def test_the_plugin_loads_nothing_of_ours() -> None:
    script = (
        "import sys, unified.testing; "
        "ours = ('unified.', 'torch', 'numpy', 'zmq', 'msgspec'); "
        "print(sorted(name for name in sys.modules if name.startswith(ours)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.strip("[]\n").replace("'", "").split(", "))
    names_alone = {"unified.api", "unified.api.runtime"}
    assert loaded <= {"unified.errors", "unified.lazy", "unified.testing", *names_alone}


def test_a_child_that_was_not_ended_is_noticed_and_a_zombie_is_not() -> None:
    before = Belongings()
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            left = left_behind(before, settle_s=0.0)  # beside it what other tests left may have moved
            assert any(each.startswith(f"process {child.pid} (") for each in left)
        finally:
            child.kill()
        assert left_behind(before) == []  # nobody has waited for it yet
