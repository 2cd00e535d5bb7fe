"""Linux's facts and controls of processes that Python lacks: parent-death signals, subreapers, liveness.

The module imports no other module of the package, because daemons, the zygote and workers all need it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_KILL_WITHIN_S = 2.0
_KILL_PAUSE_S = 0.002
_COMM_BYTES = 15


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


def nice_session(nice: int, pid: int) -> bool:
    """Set the nice value of a process's whole session, if the kernel shares the CPU among sessions (autogroups).

    With autogroups, a process's own nice value counts only within its session. A session's value can be lowered again,
    a process's cannot. Without autogroups, nothing is done. Returns False if the caller must try again: the kernel
    takes one value in 0.1 s.
    """
    try:
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))
    except BlockingIOError:
        return False
    except OSError:  # no autogroups, or the process is gone
        pass
    return True


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
    return ProcessFacts(pid, fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def unreaped_code(pid: int) -> int | None:
    """Return the exit code, or minus the signal, of a process that has ended; None if it has not, or was reaped."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = line[line.rindex(b")") + 2 :].split()
    return os.waitstatus_to_exitcode(int(fields[49])) if fields[0] == b"Z" else None


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


def kill_until_none(find: Callable[[], Iterable[int]]) -> None:
    """SIGKILL every process that `find` names, until all have ended: children of a dead parent may appear late.

    A parent takes time to die: all its threads end first, and its memory is freed. After 2 s this gives up, because
    some processes cannot be killed, such as one that waits for a disk.
    """
    deadline = time.monotonic() + _KILL_WITHIN_S
    ended: set[int] = set()
    # `find` may miss the children of a parent that dies meanwhile, so call it once more after every end.
    while not (named := set(find())) <= ended:
        alive = {pid for pid in named if is_alive(pid)}
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # PermissionError: it became another user
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        ended = named - alive
        time.sleep(_KILL_PAUSE_S if alive else 0)


def describe_end(code: int) -> str:
    """Return ``killed by SIGKILL`` or ``exited with code 3``, from an exit code that is minus the signal."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
