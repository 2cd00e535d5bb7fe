"""Linux's facts and controls of processes that Python lacks: parent-death signals, subreapers, liveness.

They are at the bottom of the tree, because daemons, the zygote and workers all need them.
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
    """Let the kernel send `sig` to this process when the *thread* that made it ends; here and now if that was another
    process than `parent`, which has gone already.

    Call it first thing in a child. It survives `exec`, and is not inherited by children.
    """
    _prctl(_PR_SET_PDEATHSIG, sig)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), sig)


def become_subreaper() -> None:
    """Adopt orphaned descendants instead of letting them go to PID 1."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_title(title: str, suffix: str = "") -> None:
    """Name this process for `ps -o comm` and `top`. The kernel keeps 15 bytes: of a long title the end is cut away,
    of the suffix nothing.
    """
    end = suffix.encode()
    _prctl(_PR_SET_NAME, title.encode()[: max(0, _COMM_BYTES - len(end))] + end)


def set_command_line(text: str) -> None:
    """Replace what `ps` shows as this process's command line, which a fork has from its parent; cut to its length.

    The kernel shows the memory in which the arguments were at the start. It is overwritten only where it can be found
    and still holds them, so at worst nothing changes.
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
    """Nice the whole session of a process, where the kernel shares the CPU among sessions (autogroups).

    There a process's own nice value counts only within its session; unlike that, a session's can be lowered again.
    Elsewhere nothing is done. Returns False if it is to be tried again, as the kernel takes one value in 0.1 s.
    """
    try:
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))
    except BlockingIOError:
        return False
    except OSError:  # no such thing here, or the process is gone
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
    """Start time in clock ticks since boot: with the pid, it names one process for ever."""

    @property
    def is_alive(self) -> bool:
        """False for a zombie: it has ended, and nobody has looked at its exit code yet (PID 1 may take a second to)."""
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
    """Return True if a process was started with ``NAME=value`` in its environment; False where that is unreadable."""
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
    """Signal a whole process group, if anybody is left in it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, sig)


def is_handled(pid: int, number: int) -> bool:
    """Return True if the process handles the signal, which else would end it."""
    return _is_in_mask(pid, "SigCgt", number)


def is_blocked(pid: int, number: int) -> bool:
    """Return True if the main thread of the process blocks the signal, as one does that waits for it."""
    return _is_in_mask(pid, "SigBlk", number)


def _is_in_mask(pid: int, mask: str, number: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    masks = {name: value for name, _, value in (line.partition(":\t") for line in lines)}
    return bool(int(masks[mask], 16) & 1 << (number - 1))


def kill_until_none(find: Callable[[], Iterable[int]]) -> None:
    """SIGKILL every process that `find` names, until it names none: a dead parent's children come to light.

    That takes as long as the parent takes to die, which it does after all its threads and with all its memory.
    Processes that cannot be killed, such as one that waits for a disk, are given up after 2 s.
    """
    deadline = time.monotonic() + _KILL_WITHIN_S
    ended: set[int] = set()
    # A parent that dies while `find` looks around hides its children: only a look after its end is the last one.
    while not (named := set(find())) <= ended:
        alive = {pid for pid in named if is_alive(pid)}
        if time.monotonic() > deadline:
            return
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter: it became another user
                os.kill(pid, signal.SIGKILL)
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
