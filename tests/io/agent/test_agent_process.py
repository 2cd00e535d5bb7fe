"""What `unified.process` makes of a real process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from unified import process

SCRIPT = """
import os, sys
from unified import process
sys.stdin.readline()
if os.fork() == 0:
    process.set_title("reward_model_server", "-12")
    process.set_command_line("unified worker: " + "long " * 100 if sys.argv[1] == "long" else "a worker")
    own = f"/proc/{os.getpid()}"
    print(repr(open(own + "/comm").read()), open(own + "/cmdline", "rb").read(), os.environ["MARK"], sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
os.wait()
print(open("/proc/self/cmdline", "rb").read().endswith(b"mark-of-the-parent\\0"))
"""


def look(mode: str) -> list[str]:
    command = [sys.executable, "-c", SCRIPT, mode, "mark-of-the-parent"]
    done = subprocess.run(command, input="\n", capture_output=True, text=True, check=True, env={"MARK": "kept"})
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_a_fork_shows_what_it_is_and_its_parent_stays() -> None:
    child, parent = look("short")
    comm, _, rest = child.partition(" ")
    assert comm == repr("reward_model-12\n")
    shown = rest.partition("' kept")[0].removeprefix("b'")
    assert shown.replace("\\x00", "") == "a worker"
    assert rest.endswith("kept ['short', 'mark-of-the-parent']")
    assert parent == "True"


def test_a_long_command_line_is_cut_to_the_room_there_is() -> None:
    child, _ = look("long")
    assert "unified worker: long long" in child
    assert child.endswith("kept ['long', 'mark-of-the-parent']"), "neither the environment nor Python's own list"
    assert Path(sys.executable).name not in child


def test_a_process_that_became_another_user_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def refuse(pid: int, number: int) -> None:
        tries.append(pid)
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    monkeypatch.setattr(process, "_KILL_WITHIN_S", 0.05)
    process.kill_until_none(lambda: [os.getpid()])
    assert set(tries) == {os.getpid()}


def test_kills_until_no_more_come_to_light() -> None:
    """What a process has started is only found when that one has died, which takes its time."""
    started = [subprocess.Popen(["sleep", "60"])]

    def find() -> list[int]:
        if started[-1].poll() is not None and len(started) < 12:
            started.append(subprocess.Popen(["sleep", "60"]))
        return [one.pid for one in started if one.poll() is None]

    process.kill_until_none(find)
    assert [one.wait(0) for one in started] == [-signal.SIGKILL] * 12


def test_kills_what_was_hidden_by_a_parent_that_died_during_the_look() -> None:
    parent, child = subprocess.Popen(["true"]), subprocess.Popen(["sleep", "60"])
    os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
    looks = iter([[parent.pid], [parent.pid, child.pid]])
    process.kill_until_none(lambda: next(looks, [parent.pid, child.pid]))
    assert child.wait(100) == -signal.SIGKILL
    assert parent.wait(100) == 0


def test_a_killed_group_leaves_no_shared_memory_of_multiprocessing() -> None:
    """The first process of the group is dead already, as an engine that the kernel has killed."""
    script = (
        "import os, subprocess, sys; from multiprocessing import resource_tracker, shared_memory; "
        "code = 'import time; from multiprocessing import shared_memory; '"
        "'m = shared_memory.SharedMemory(sys.argv[1]); print(m.name, flush=True); time.sleep(60)'; "
        "m = shared_memory.SharedMemory(create=True, size=4096); "
        "os.kill(resource_tracker._resource_tracker._pid, 9); "
        "subprocess.Popen([sys.executable, '-c', 'import sys; ' + code, m.name]); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0) as first:
        assert first.stdout is not None
        memory = Path("/dev/shm", first.stdout.readline().decode().strip())
        assert memory.exists()
        first.kill()
        first.wait()
        process.kill_group(first.pid)
        try:
            assert not memory.exists()
            assert first.stdout.read() == b""
        finally:
            memory.unlink(missing_ok=True)
