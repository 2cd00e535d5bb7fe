"""Preparation of a node for jobs, before their first worker starts: shipped code and required packages.

A separate process fetches or installs each folder, once for all jobs that need it; its log says what failed. No file
is read-only for root. An agent that runs as root therefore gives each job a folder of its own for its code.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from unified import process
from unified.config import settings
from unified.config.clusters import lock
from unified.config.settings import remove_folder
from unified.job.spec import JobSpec
from unified.protocol.records import JobWorkerIncarnation, Progress
from unified.protocol.worker_agent import Reported
from unified.threads import start_thread
from unified_agent.core.messages import WorkerSaid
from unified_agent.environment import NodeFacts
from unified_agent.helper_process import HelperProcess
from unified_agent.processes import Processes
from unified_agent.spawn import spawn

log = logging.getLogger("unified_agent")
CODE, ENVIRONMENTS = "code", "environments"
"""Folders, in the home of this user's state, of unpacked archives and of virtual environments."""

TELL_EVERY_S = 2.0
"""Time between two progress messages."""
MAX_PROGRESS = 80
"""Most characters of pip's last log line in a progress message."""
MARK = "complete"
"""Name of the file that marks a complete virtual environment."""
_UNFINISHED = re.compile(r"\.[0-9a-f]+\.(.+)-(\d+)\.(?:part|new)")


class Need(NamedTuple):
    """A folder that a job needs, and the program that makes it."""

    digest: str
    into: Path
    what: str
    mark: str
    """Name of the file that marks a complete folder; empty: the folder exists only when it is complete."""
    module: str
    arguments: list[str]
    requirements: list[str]
    """Lines of the requirements file for the program; empty: no file."""
    is_own: bool = False
    """The folder is for one job alone, and is removed with it."""

    @property
    def folder(self) -> Path:
        return self.into / self.digest

    @property
    def is_met(self) -> bool:
        return (self.folder / self.mark).exists()

    def awaited(self) -> str:
        """Return what is awaited, and its progress: the last line of pip's log, or the size received so far."""
        with contextlib.suppress(OSError):
            if self.requirements:
                last = (self.into / f"{self.digest}.log").read_text(errors="replace").strip().rpartition("\n")[2]
                return f"{self.what}: {last[:MAX_PROGRESS]}" if last else self.what
            for part in self.into.glob(f".{self.digest}.*.part"):
                return f"{self.what}: {part.stat().st_size / (1 << 20):.1f} MiB received"
        return self.what


class Preparation:
    """Folders that jobs need, and the workers that wait for them.

    Args:
        on_event: called with messages in the name of waiting workers, which say what they wait for.

    Attributes:
        next_deadline: time (`time.monotonic()`) at which `tell` is due; None: nothing is being made.
    """

    def __init__(
        self, processes: Processes, facts: NodeFacts, env: Mapping[str, str], on_event: Callable[[WorkerSaid], None]
    ) -> None:
        self._processes = processes
        self._facts = facts
        self._env = dict(env)
        self._on_event = on_event
        self._home = settings.home().absolute()
        self._needs: dict[str, list[Need]] = {}
        self._waiting: dict[JobWorkerIncarnation, list[Need]] = {}
        """Unmet needs of waiting workers."""
        self._making: set[str] = set()
        self._locks: dict[str, int] = {}
        """Descriptors of the locks that protect used folders from removal, by digest."""
        self._said: dict[JobWorkerIncarnation, str] = {}
        self.next_deadline: float | None = None
        start_thread("unified-unfinished", self._sweep)

    def described(self, job_id: str, spec: JobSpec) -> JobSpec:
        """Note what a job needs; return its description with the interpreter of its environment."""
        self._needs[job_id] = needs = []
        if spec.code is not None:
            needs.append(self._code(job_id, spec.code.digest))
        if spec.requirements:
            needs.append(self._environment(spec.requirements))
            spec = structs.replace(spec, python=str(needs[-1].folder / "bin/python"))
        return spec

    def code_dir(self, job_id: str) -> str:
        """Return the folder of a job's code; empty: the job ships no code."""
        return next((str(need.folder) for need in self._needs.get(job_id, []) if need.into.name == CODE), "")

    def has_needs(self, job_id: str) -> bool:
        return bool(self._needs.get(job_id))

    def release_when_met(self, incarnation: JobWorkerIncarnation) -> None:
        """Release a held worker as soon as all needs of its job are met."""
        needs = self._needs[incarnation.job_id]
        for need in needs:
            self._use(need)
        self._waiting[incarnation] = [need for need in needs if not need.is_met]
        try:
            for need in self._waiting[incarnation]:
                if need.digest not in self._making:
                    self._make(need)
        except OSError as error:  # no descriptors or processes are left: the next incarnation may succeed
            del self._waiting[incarnation]
            self._said.pop(incarnation, None)
            self._processes.refuse(incarnation, f"could not be started: {error.strerror}", "crash")
            return
        self._tell(incarnation)
        self._settle(incarnation)

    def tell(self) -> None:
        """Report the progress of each waiting worker's needs."""
        self.next_deadline = time.monotonic() + TELL_EVERY_S if self._making else None
        for incarnation in self._waiting:
            self._tell(incarnation)

    def keep(self, job_ids: Collection[str]) -> None:
        """Forget the needs of all other jobs that have no process here."""
        gone = self._needs.keys() - job_ids
        if gone:
            gone -= {incarnation.job_id for incarnation in self._processes.incarnations()}
        if not gone:
            return
        own = [need for job_id in gone for need in self._needs.pop(job_id) if need.is_own]
        used = {need.digest for needs in self._needs.values() for need in needs}
        for digest in self._locks.keys() - used:
            os.close(self._locks.pop(digest))
        for need in own:
            self._remove(need)

    def _remove(self, need: Need) -> None:
        """Remove a folder in a thread, under a name that the job does not find if it comes back meanwhile."""
        unfinished = need.into / f".{need.digest}.{socket.gethostname()}-{os.getpid()}.new"
        with contextlib.suppress(OSError, RuntimeError):  # there is no folder; without a thread, the next agent does it
            need.folder.rename(unfinished)
            (need.into / f"{need.digest}.lock").unlink(missing_ok=True)
            start_thread("unified-removal", remove_folder, unfinished)

    def _sweep(self) -> None:
        remove_unfinished(self._home / CODE)
        remove_unfinished(self._home / ENVIRONMENTS, MARK)

    def _code(self, job_id: str, digest: str) -> Need:
        into, is_own = self._home / CODE, os.geteuid() == 0
        own = f"{digest} {job_id} {self._facts.incarnation}"
        name = hashlib.sha256(own.encode()).hexdigest() if is_own else digest
        arguments = ["--master", self._facts.master, "--digest", digest, "--into", str(into / name)]
        return Need(name, into, "the code of its job", "", "unified.client.code.transfer", arguments, [], is_own)

    def _environment(self, lines: list[str]) -> Need:
        """Return the need of an environment with a job's requirements, on top of this agent's packages."""
        parts = [*lines, "", self._facts.hostname, self._facts.python, sys.version]
        digest, into = hashlib.sha256("\n".join(parts).encode()).hexdigest(), self._home / ENVIRONMENTS
        arguments = ["--digest", digest, "--into", str(into), "--file", str(self._file(digest))]
        what = f"the packages that its job requires ({into}/{digest[:12]}….log)"
        return Need(digest, into, what, MARK, "unified.client.code.environment", arguments, lines)

    def _file(self, digest: str) -> Path:
        return Path(self._facts.run_dir) / f"requirements-{digest[:12]}.txt"

    def _use(self, need: Need) -> None:
        """Hold the lock of an existing folder, if the file system has locks."""
        if need.digest in self._locks or not need.is_met:
            return
        try:
            os.utime(need.folder)
            descriptor = lock(need.into / f"{need.digest}.lock", kind=fcntl.LOCK_SH)
        except OSError as error:
            log.warning("event=not-locked folder=%s reason=%r", need.digest[:12], str(error))
            return
        if descriptor is not None:
            self._locks[need.digest] = descriptor

    def _make(self, need: Need) -> None:
        if (held := self._locks.pop(need.digest, None)) is not None:  # somebody removed the folder
            os.close(held)
        if need.requirements:
            self._file(need.digest).write_text("".join(f"{line}\n" for line in need.requirements))
        name = Path(self._facts.run_dir) / f"make-{need.digest[:12]}.log"
        helper = HelperProcess(spawn(self._facts.python, need.module, need.arguments, log=name, env=self._env))
        self._making.add(need.digest)
        self.next_deadline = time.monotonic() + TELL_EVERY_S
        self._processes.add_helper(helper.pid, lambda code: self._made(need, helper, code))

    def _made(self, need: Need, helper: HelperProcess, code: int) -> None:
        helper.reaped(code)
        helper.close()
        self._making.remove(need.digest)
        self._file(need.digest).unlink(missing_ok=True)
        if code == 0:
            self._use(need)
            log.info("event=made folder=%s/%s seconds=%.1f", need.into, need.digest[:12], helper.age_s)
        for incarnation in [incarnation for incarnation, needs in self._waiting.items() if need in needs]:
            if code == 0:
                self._waiting[incarnation].remove(need)
                self._settle(incarnation)
            else:
                del self._waiting[incarnation]
                self._said.pop(incarnation, None)
                self._processes.refuse(incarnation, f"{helper.last_words()} (on node {self._facts.node})")
        helper.remove_log()
        if need.is_own and all(need not in needs for needs in self._needs.values()):  # its job is gone
            self._remove(need)

    def _settle(self, incarnation: JobWorkerIncarnation) -> None:
        if not self._waiting[incarnation]:
            del self._waiting[incarnation]
            self._say(incarnation, "")
            del self._said[incarnation]
            self._processes.release(incarnation)

    def _tell(self, incarnation: JobWorkerIncarnation) -> None:
        if needs := self._waiting[incarnation]:
            self._say(incarnation, " and ".join(need.awaited() for need in needs))

    def _say(self, incarnation: JobWorkerIncarnation, waits_for: str) -> None:
        if waits_for == self._said.get(incarnation):
            return
        self._said[incarnation] = waits_for
        self._on_event(WorkerSaid(incarnation=incarnation, word=Reported(progress=Progress(waits_for=waits_for[:200]))))


def remove_unfinished(into: Path, mark: str = "") -> None:
    """Remove what programs of this host had not finished when they were killed with their agent.

    Args:
        mark: name of the file that marks a complete folder; empty: a folder under its final name is complete.
    """
    for path in into.iterdir() if into.is_dir() else ():
        if made_by := _UNFINISHED.fullmatch(path.name):
            if made_by[1] == socket.gethostname() and not process.is_alive(int(made_by[2])):
                remove_folder(path) if path.is_dir() else path.unlink(missing_ok=True)
        elif mark and path.is_dir() and not (path / mark).exists():
            with contextlib.suppress(OSError):  # a file system without locks: the next maker removes the folder
                descriptor = lock(into / f"{path.name}.lock")
                if descriptor is not None:
                    if not (path / mark).exists():
                        remove_folder(path)
                        (into / f"{path.name}.lock").unlink(missing_ok=True)
                    os.close(descriptor)
