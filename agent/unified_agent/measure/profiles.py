"""Profiles of workers, taken from outside by py-spy or memray (the extra `debug`), on one thread per profile.

The tools write into memory; only a complete profile is stored beside the worker's log, as its stream `profile`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from unified.protocol.agent_master import ReadAgentLog
from unified.protocol.records import MAX_PROFILE_BYTES, JobWorkerIncarnation
from unified.threads import call_guarded, start_thread
from unified_agent.core.messages import SampleWorker
from unified_agent.logs.search import RunProgram

TOOL_S = 15.0
"""Time for a tool beyond the time of its samples."""
POLL_S = 0.5
_REFUSED = ("Permission", "Operation not permitted")
_NO_RIGHT = (
    "the kernel does not let {} read the process: give its agent CAP_SYS_PTRACE (a container: --cap-add SYS_PTRACE), "
    "or set kernel.yama.ptrace_scope=0 on its host"
)


class ProfileError(Exception):
    """Reason why there is no profile."""


class Profiler:
    """Takes profiles; `begin` is called from the daemon's loop and returns at once.

    Args:
        log_dir: folder of the logs.
        run: runs a program, as `Processes.run_program` does.
        answer: answers an order with the stored profile, or with an error; called from any thread.
    """

    def __init__(self, log_dir: Path, run: RunProgram, answer: Callable[[ReadAgentLog, int, str], None]) -> None:
        self._log_dir = log_dir
        self._run = run
        self._answer = answer
        self._open: set[JobWorkerIncarnation] = set()

    def begin(self, action: SampleWorker) -> None:
        """Take a profile of a worker; the worker goes on meanwhile."""
        if action.incarnation in self._open:
            self._answer(action.order, action.request_id, "it is being profiled already")
            return
        self._open.add(action.incarnation)
        try:
            start_thread("profile", call_guarded, "profile-failed", self._take, action)
        except RuntimeError as error:
            self._open.discard(action.incarnation)
            self._answer(action.order, action.request_id, f"its agent has no thread for it: {error}")

    def _take(self, action: SampleWorker) -> None:
        error, incarnation, seconds = "", action.incarnation, max(1, round(action.order.wait_s))
        path = self._log_dir / incarnation.job_id / incarnation.worker / f"{incarnation.number}.profile"
        try:
            with _memory_file() as made, _memory_file() as record:
                if action.order.take == "memory":
                    self._allocations(action.pid, seconds, made.fileno(), record.fileno())
                else:
                    self._samples(action.pid, seconds, action.order.take or "", made.fileno())
                _write_whole(path, made)
        except ProfileError as reason:
            error = str(reason)
        except Exception as fault:  # for example a full disk
            error = f"its profile cannot be written: {fault}"
        self._open.discard(incarnation)
        self._answer(action.order, action.request_id, error)

    def _samples(self, pid: int, seconds: int, form: str, made: int) -> None:
        options = ["--nonblocking", "--format", form, "--duration", str(seconds), "--output", f"/dev/fd/{made}"]
        said = self._call(["py-spy", "record", *options, "--pid", str(pid)], seconds + TOOL_S, [made])
        if "No stack counts" in said or "Samples: 0 " in said:  # of a flame graph, of speedscope
            raise ProfileError("it ran no Python code in that time; `unified stack` shows where it waits")
        if "Error:" in said or not os.fstat(made).st_size:
            raise ProfileError(f"py-spy cannot read it: {_first_line(said)}")

    def _allocations(self, pid: int, seconds: int, made: int, record: int) -> None:
        """Let memray record the allocations of a process, and make a page of them."""
        if not (find_program("gdb") or find_program("lldb")) and sys.version_info < (3, 14):
            raise ProfileError("memray attaches by gdb or lldb, and its node has neither: install gdb there")
        options = ["--aggregate", "--no-compress", "--force", "--duration", str(seconds)]
        target = f"/proc/{os.getpid()}/fd/{record}"  # the worker opens it
        said = self._call(["memray", "attach", *options, "--output", target, str(pid)], TOOL_S, [])
        if "memray: tracking" not in said:
            raise ProfileError(f"memray cannot attach to it: {_first_line(said)}")
        time.sleep(seconds)
        until = time.monotonic() + TOOL_S
        while not os.fstat(made).st_size:
            if time.monotonic() > until or not Path(f"/proc/{pid}").exists():
                raise ProfileError("memray has not written a complete record; the process may have ended")
            time.sleep(POLL_S)
            if os.fstat(record).st_size:
                page = ["memray", "flamegraph", "--no-web", "--force", "--output", f"/dev/fd/{made}"]
                self._call([*page, f"/dev/fd/{record}"], TOOL_S, [made, record])

    def _call(self, command: list[str], within_s: float, passed: list[int]) -> str:
        name = command[0]
        if (program := find_program(name)) is None:
            raise ProfileError(f"{name} is not installed on its node: pip install 'unified-runtime[debug]' there")
        try:
            out, err = self._run([program, *command[1:]], within_s, passed)
        except subprocess.TimeoutExpired:
            raise ProfileError(f"{name} did not end within {within_s:g} s") from None
        said = (err + out).decode(errors="replace")
        if any(word in said for word in _REFUSED):
            raise ProfileError(_NO_RIGHT.format(name))
        return said


def find_program(name: str) -> str | None:
    """Return the path of a program beside the agent's interpreter or in its ``PATH``; None if there is none."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def _memory_file() -> BinaryIO:
    return open(os.memfd_create("unified-profile", os.MFD_CLOEXEC), "rb")


def _write_whole(path: Path, made: BinaryIO) -> None:
    if (size := os.fstat(made.fileno()).st_size) > MAX_PROFILE_BYTES:
        raise ProfileError(f"its profile has {size >> 20} MiB, more than {MAX_PROFILE_BYTES >> 20} MiB")
    fresh = path.with_suffix(".profile.new")
    try:
        fresh.touch(0o600)
        fresh.write_bytes(made.read())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _first_line(said: str) -> str:
    return next((line.strip() for line in said.splitlines() if line.strip()), "it said nothing")[:300]
