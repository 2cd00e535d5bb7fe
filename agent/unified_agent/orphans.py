"""The lock of a node id, which allows one agent per cluster and host, and the clean-up after killed agents.

A running agent locks `<run root>/agents/<node>-<cluster>.lock`, and writes there who it is. An agent that starts reads
the files of killed agents of all clusters, and ends the processes that have their incarnation in the environment.

Shared memory of dead workers is removed when an agent starts, when one of its workers ends, again after a time for
messages that were on their way, and when the agent stops. After a killed agent its lease keeper removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import socket
import struct
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from unified import process
from unified.bus.shm.files import Sweeper
from unified.config import settings
from unified.errors import ClusterError
from unified.values import Value
from unified_agent.spawn import MARKER_INCARNATION, MARKER_NODE, MARKER_SNAPSHOTS, RUN_DIR_PREFIX, run_folder

log = logging.getLogger("unified_agent")
CLEAN_UP_S = 10.0
"""Time for which an agent waits while another one cleans up after its own predecessor."""
LOCKS = "agents"
"""Folder of the locks, in the run root."""


class AgentTakenError(ClusterError):
    """An agent of this node id is alive on this host."""


class AgentRecord(Value, frozen=True):
    """The agent that holds, or held, a node id."""

    node: str
    pid: int
    incarnation: str
    run_dir: str
    start_ticks: int
    """Start time of the agent's own process: its children are not older."""


class NodeLock:
    """The lock of a node id of one cluster on this host, held until `release`, or the process's end."""

    def __init__(self, run_root: Path, node: str, master: str) -> None:
        """Take the lock; AgentTakenError: the pid in the message holds it."""
        self._path = settings.make_private(run_root / LOCKS) / f"{node}-{_digest(master, node)[:12]}.lock"
        self._node = node
        self._descriptor = self._take()

    def _take(self) -> int:
        deadline = time.monotonic() + CLEAN_UP_S
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _read_record(descriptor)
                os.close(descriptor)
                is_left = holder is None or not process.is_alive(holder.pid)
                if is_left and time.monotonic() < deadline:  # another agent cleans up after the last one
                    time.sleep(0.02)
                    continue
                raise _taken(self._node, holder.pid if holder is not None else None) from None
            try:
                if os.fstat(descriptor).st_ino == self._path.stat().st_ino:
                    return descriptor
            except FileNotFoundError:
                pass
            os.close(descriptor)  # its last owner removed the file between our open and our lock

    def write(self, record: AgentRecord) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, msgspec.json.encode(record), 0)

    def release(self) -> None:
        """Release the lock at an orderly end: nothing is left to clean up."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


class NodeClaim(NamedTuple):
    """The identity and the run folder of one incarnation of an agent."""

    incarnation: str
    run_dir: Path
    """The run folder (0700), for sockets and the like."""


def sweep(sweeper: Sweeper, living: Collection[str] = (), *, is_last: bool = False) -> None:
    """Remove shared memory of dead processes, if nobody reads it; `living` and `is_last` as in `Sweeper.sweep`."""
    removed = sweeper.sweep(time.monotonic(), time.time(), living=living, is_last=is_last)
    if removed:
        log.info("event=shared-memory-removed segments=%d first=%s", len(removed), removed[0])


def hold_name(master: str, node: str) -> socket.socket:
    """Hold a node id for one master on this host, for as long as the socket is open.

    The lock file lies in the run folder, which differs between users and between a login shell and a service. All of
    them share the names of the abstract namespace, and a name ends with its process.

    AgentTakenError: the pid in the message holds it.
    """
    name = "\0unified-agent-" + _digest(master, node)[:32]
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        holder.bind(name)
        holder.listen(1)
    except OSError as error:
        holder.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise _taken(node, _holder_of(name)) from None
    return holder


def _digest(master: str, node: str) -> str:
    return hashlib.sha256(f"{master} {node}".encode()).hexdigest()


def _holder_of(name: str) -> int | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
        asker.settimeout(1.0)
        try:
            asker.connect(name)
        except OSError:
            return None
        pid, _, _ = struct.unpack("3i", asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        return int(pid) or None


def _taken(node: str, pid: int | None) -> AgentTakenError:
    who = f" as pid {pid}" if pid is not None else ""
    return AgentTakenError(
        f"an agent for node {node!r} already runs on this host{who}: stop it, or give this one another name with "
        "--node-id."
    )


@contextlib.contextmanager
def claim(run_root: Path, node: str, master: str, incarnation: str = "") -> Iterator[NodeClaim]:
    """Clean up after killed agents, and hold a node id and a run folder; AgentTakenError: another agent has the id.

    Args:
        incarnation: the agent's incarnation, if its zygote runs under that name already.
    """
    clean_up_all(run_root)
    lock = NodeLock(run_root, node, master)
    try:
        name = hold_name(master, node)
    except BaseException:
        lock.release()
        raise
    sweeper = Sweeper()
    sweep(sweeper)
    incarnation = incarnation or secrets.token_hex(8)
    run_dir = run_folder(run_root, incarnation)
    own = process.facts(os.getpid())
    ticks = own.start_ticks if own is not None else 0
    lock.write(
        AgentRecord(node=node, pid=os.getpid(), incarnation=incarnation, run_dir=str(run_dir), start_ticks=ticks)
    )
    try:
        yield NodeClaim(incarnation, run_dir)
    finally:
        sweep(sweeper, is_last=True)
        shutil.rmtree(run_dir, ignore_errors=True)
        lock.release()
        name.close()


def _read_record(descriptor: int) -> AgentRecord | None:
    try:
        return msgspec.json.decode(os.pread(descriptor, 65536, 0), type=AgentRecord)
    except msgspec.DecodeError:
        return None


def clean_up_all(run_root: Path) -> None:
    """End what killed agents of this user left on this host: agents whose lock file remains, but is not locked."""
    for path in sorted((run_root / LOCKS).glob("*.lock")):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # its agent lives
                continue
            if os.fstat(file.fileno()).st_ino != path.stat().st_ino:
                continue  # somebody has cleaned up meanwhile, and this file has another owner
            if (record := _read_record(file.fileno())) is not None:
                killed = clean_up(record, run_root)
                text = (
                    f"an agent of node {record.node} (pid {record.pid}) was killed; ended {len(killed)} processes of it"
                )
                log.warning("event=orphans-ended %s", text)
            path.unlink()


def clean_up(record: AgentRecord, run_root: Path) -> list[int]:
    """End what a killed agent left and remove its run folder; return the pids that had to be killed.

    A process counts as the agent's only if its environment names the node and this incarnation, it belongs to this
    user, and it started after the agent.
    """

    killed = kill_processes(record.node, record.incarnation, record.start_ticks)
    run_dir = Path(record.run_dir)
    if run_dir.parent == run_root and run_dir.name.startswith(RUN_DIR_PREFIX):
        shutil.rmtree(run_dir, ignore_errors=True)
    return killed


def kill_processes(node: str, incarnation: str, start_ticks: int, *, with_snapshots: bool = True) -> list[int]:
    """Kill the processes that an agent's incarnation started, and their descendants, but not the calling process;
    return the pids found first.
    """

    seen: dict[int, int] = {}
    """Start times by pid: a process once found is awaited, although its parent may end first."""

    def left() -> list[int]:
        there = [
            one
            for one in process.every_process()
            if one.is_alive
            and one.start_ticks >= start_ticks
            and one.pid != os.getpid()
            and (with_snapshots or not process.has_environment(one.pid, f"{MARKER_SNAPSHOTS}=1"))
        ]
        found = {
            one.pid
            for one in there
            if seen.get(one.pid) == one.start_ticks
            or (
                process.has_environment(one.pid, f"{MARKER_INCARNATION}={incarnation}")
                and process.has_environment(one.pid, f"{MARKER_NODE}={node}")
            )
        }
        while more := {one.pid for one in there if one.parent in found} - found:  # whatever environment they have
            found |= more
        seen.update({one.pid: one.start_ticks for one in there if one.pid in found})
        return sorted(found)

    found = left()
    process.kill_until_none(left)
    return found
