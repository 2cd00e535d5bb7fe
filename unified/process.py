"""Linux's facts and controls of processes that Python lacks: parent-death signals, subreapers, liveness.

The module imports no other module of the package, because daemons, the zygote and workers all need it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_KILL_WITHIN_S = 2.0
_KILL_PAUSE_S = 0.002
_COMM_BYTES = 15
SHARED_MEMORY = "/dev/shm"
_TRACKED = re.compile(r"psm_[0-9a-f]+|sem\.mp-\w+|torch_[0-9_]+")
"""Names of files that `multiprocessing` and torch make there, and that are left if their resource tracker is killed."""


def die_with_parent(sig: int, parent: int | None = None) -> None:
    """Let the kernel send `sig` to this process when the *thread* that made it ends; at once if `parent` has ended.

    Call it first in a child. The setting survives `exec`, and is not inherited by children.
    """
    _prctl(_PR_SET_PDEATHSIG, sig)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), sig)


def become_subreaper() -> None:
    """Adopt orphaned descendants instead of letting them go to PID 1."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_title(title: str, suffix: str = "") -> None:
    """Name this process for `ps -o comm` and `top`. The kernel keeps 15 bytes: the end of a long title is cut,
    but not the suffix.
    """
    end = suffix.encode()
    _prctl(_PR_SET_NAME, title.encode()[: max(0, _COMM_BYTES - len(end))] + end)


def set_command_line(text: str) -> None:
    """Replace this process's command line in `ps`, which a fork has from its parent; `text` is cut to its length.

    The kernel shows the memory in which the arguments were at the start. The memory is overwritten only if it is found
    and still holds the arguments, so at worst nothing changes.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        with open("/proc/self/cmdline", "rb") as file:
            shown = file.read()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end: 48 and 49 in proc(5)
        size = end - start
        if start > 0 and size > 0 and size == len(shown) and ctypes.string_at(start, size) == shown:
            ctypes.memmove(start, text.encode()[: size - 1].ljust(size, b"\0"), size)


def _prctl(option: int, argument: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


class ProcessFacts(NamedTuple):
    """A line of ``/proc/PID/stat``."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    start_ticks: int
    """Start time in clock ticks since boot: with the pid, it identifies one process for ever."""
    status: int
    """Wait status of a zombie."""

    @property
    def is_alive(self) -> bool:
        """False for a zombie: it has ended, and is not reaped yet (PID 1 may take a second to reap it)."""
        return self.state not in "ZX"


def facts(pid: int) -> ProcessFacts | None:
    """Return the kernel's facts of a process, or None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except OSError:
        return None
    # The name is in brackets and may itself hold brackets and spaces.
    fields = line[line.rindex(b")") + 2 :].split()
    return ProcessFacts(pid, fields[0].decode(), *(int(fields[index]) for index in (1, 2, 3, 19, 49)))


def is_alive(pid: int) -> bool:
    """Return True if the process exists and is no zombie."""
    found = facts(pid)
    return found is not None and found.is_alive


def every_process() -> Iterator[ProcessFacts]:
    """Yield all processes that this one can see, by pid."""
    for pid in sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        found = facts(pid)
        if found is not None:
            yield found


def has_environment(pid: int, setting: str) -> bool:
    """Return True if a process was started with ``NAME=value`` in its environment; False if that is unreadable."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return setting.encode() in file.read().split(b"\0")
    except OSError:
        return False


def num_threads() -> int:
    """Return the number of threads of this process, those of C libraries included."""
    return len(os.listdir("/proc/self/task"))


def close_all_but(keep: Iterable[int]) -> None:
    """Close every descriptor above 2 that is not in `keep`."""
    low = 3
    for descriptor in sorted(set(keep)):
        if descriptor >= low:
            os.closerange(low, descriptor)
            low = descriptor + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))


def signal_group(leader: int, sig: int) -> None:
    """Signal a whole process group, if a process is left in it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, sig)


def group_members(leader: int) -> list[int]:
    """Return the pids of a process group."""
    return [each.pid for each in every_process() if each.group == leader]


def kill_group(leader: int, files: Iterable[str] = ()) -> None:
    """End a whole process group as `kill_until_none` does."""
    kill_until_none(lambda: group_members(leader), files)


def is_handled(pid: int, number: int) -> bool:
    """Return True if the process handles the signal, which would otherwise end it."""
    return _is_in_mask(pid, "SigCgt", number)


def is_blocked(pid: int, number: int) -> bool:
    """Return True if the main thread of the process blocks the signal, for example to wait for it."""
    return _is_in_mask(pid, "SigBlk", number)


def _is_in_mask(pid: int, mask: str, number: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    masks = {name: value for name, _, value in (line.partition(":\t") for line in lines)}
    return bool(int(masks[mask], 16) & 1 << (number - 1))


def used_files(paths: Iterable[str], pids: Iterable[int]) -> set[str]:
    """Return those of this user's files in /dev/shm that one of the processes has mapped or open. Files are compared by
    inode, not by name: glibc makes a semaphore under another name first."""
    files = dict[int, str]()
    for path in paths:
        with contextlib.suppress(OSError):  # gone already
            if (found := os.stat(path, follow_symlinks=False)).st_uid == os.getuid():
                files[found.st_ino] = path
    used = set[int]()
    for folder in [f"/proc/{pid}" for pid in pids] if files else ():
        with contextlib.suppress(OSError), open(f"{folder}/maps", errors="replace") as maps:
            used |= {int(line.split(maxsplit=5)[4]) for line in maps if SHARED_MEMORY in line}
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            for each in os.scandir(f"{folder}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(each.path).startswith(SHARED_MEMORY):
                        used.add(os.stat(each.path).st_ino)
    return {files[inode] for inode in files.keys() & used}


def tracked_files(find: Callable[[], Iterable[int]]) -> set[str]:
    """Return the files of `multiprocessing` and torch that the processes named by `find` have mapped or open."""
    tracked = [f"{path}" for path in Path(SHARED_MEMORY).glob("*") if _TRACKED.fullmatch(path.name)]
    return used_files(tracked, find()) if tracked else set()


def kill_until_none(find: Callable[[], Iterable[int]], files: Iterable[str] = ()) -> None:
    """SIGKILL every process that `find` names, until all have ended: children of a dead parent may appear late.
    Then remove their `tracked_files`, and those in `files`, unless another process uses them.

    A parent takes time to die: all its threads end first, and its memory is freed. 2 s after the first signal this
    gives up, because some processes cannot be killed, such as one that waits for a disk.
    """
    deadline = math.inf
    ended, seen, left = set[int](), set[int](), {*files}
    # `find` may miss the children of a parent that dies meanwhile, so call it once more after every end.
    while not (named := set(find())) <= ended and time.monotonic() <= deadline:
        alive = {pid for pid in named if is_alive(pid)}
        left |= tracked_files(partial(alive.difference, seen))
        seen |= alive
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # PermissionError: it became another user
                os.kill(pid, signal.SIGKILL)
        deadline = min(deadline, time.monotonic() + _KILL_WITHIN_S)
        ended = named - alive
        time.sleep(_KILL_PAUSE_S if alive else 0)
    for path in left - used_files(left, (each.pid for each in every_process())):
        with contextlib.suppress(OSError):
            os.unlink(path)


def describe_end(code: int) -> str:
    """Return ``killed by SIGKILL`` or ``exited with code 3``, from an exit code that is minus the signal."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
