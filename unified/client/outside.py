"""Calls to the workers of a job from a process outside it: its driver, or ``unified call``.

Calls go through the bus relay in the master, so they reach every worker wherever it runs; they use the cluster key if
the cluster has one. Meant for monitoring and control: each has a deadline, and a round trip takes about a millisecond.
"""

from __future__ import annotations

import getpass
import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, overload

from msgspec.structs import replace

from unified.bus.calls.future import RpcFuture, gather
from unified.bus.calls.registry import MethodRegistry
from unified.bus.endpoint import BusEndpoint
from unified.bus.identity import BusIdentity, BusNetwork
from unified.client.connection import MasterConnection
from unified.errors import ClusterError, RpcError, UnifiedError, UsageError, nearest
from unified.job.names import parse_worker
from unified.protocol.client_master import GetDirectory, JobDirectory
from unified.protocol.envelope import OUTSIDE
from unified.protocol.records import DirectoryEntry, Inbox, Reachability
from unified.threads import TimerThread

DEADLINE_S = 60.0
"""Default deadline of a call."""
REFRESH_S = 1.0
"""Greatest age of the directory while calls are open, in seconds."""
RELAY_WITHIN_S = 10.0
_PING = "unified.ping"


@dataclass(eq=False, repr=False)
class OutsideWorker:
    _caller: OutsideCaller
    name: str
    """Full name."""
    role: str
    rank: int

    def __repr__(self) -> str:
        return f"OutsideWorker({self.name!r})"

    def call(self, method: str, /, *args: Any, _timeout: float | None = None, **kwargs: Any) -> RpcFuture[Any]:
        """Call an `@rpc` method of the worker and return at once, as `RoleActor.call` does in a worker.

        Args:
            method: the name under which it is registered.
            _timeout: seconds to the deadline; None: 60.

        Raises:
            UsageError: (a ValueError) an argument cannot be sent.
            ClusterError: the master or the relay cannot be reached, or the job has ended.
        """
        return self._caller.call([self.name], method, args, kwargs, _timeout)[0]


class OutsideGroup(Sequence[OutsideWorker]):
    """The workers of a role by rank, to be called from outside the job."""

    def __init__(self, caller: OutsideCaller, role: str, names: Sequence[str]) -> None:
        self._caller = caller
        self.role = role
        self._workers = [OutsideWorker(caller, name, role, rank) for rank, name in enumerate(names)]

    @overload
    def __getitem__(self, index: int) -> OutsideWorker: ...
    @overload
    def __getitem__(self, index: slice) -> list[OutsideWorker]: ...
    def __getitem__(self, index: int | slice) -> OutsideWorker | list[OutsideWorker]:
        return self._workers[index]

    def __len__(self) -> int:
        return len(self._workers)

    def __repr__(self) -> str:
        return f"OutsideGroup({self.role!r}, {len(self)} workers)"

    def call(self, method: str, /, *args: Any, _timeout: float | None = None, **kwargs: Any) -> RpcFuture[list[Any]]:
        """Call a method of every worker; the results come by rank, or the first error at once.

        For the arguments and errors see `OutsideWorker.call`.
        """
        names = [worker.name for worker in self._workers]
        futures = self._caller.call(names, method, args, kwargs, _timeout)
        return gather(futures, f"the call of {method!r} to role {self.role}")

    def call_rank0(self, method: str, /, *args: Any, **kwargs: Any) -> RpcFuture[Any]:
        """Call a method of the first worker only, as `OutsideWorker.call` does."""
        if not self._workers:
            raise UsageError(f"role {self.role} has no workers.")
        return self._workers[0].call(method, *args, **kwargs)


class OutsideCaller:
    """The bus of a job, for one process outside it. The first use opens it; `close` it afterwards.

    Args:
        connection: to the job's master.
        job: its id, or its name for the newest job of that name.
    """

    def __init__(self, connection: MasterConnection, job: str) -> None:
        self._connection = connection
        self._job = job
        self._lock = threading.Lock()
        self._directory: JobDirectory | None = None
        self._asked_at = 0.0
        self._bus: BusEndpoint | None = None
        self._timer = TimerThread("unified-outside", self._refresh)
        self._is_closed = False
        self._open: set[Future[Any]] = set()

    def has_role(self, role: str) -> bool:
        return role in self._known().roles

    def group(self, role: str) -> OutsideGroup:
        """The workers of a role.

        Raises:
            UsageError: (a ValueError) the job has no such role.
            RefusedError: there is no such job, or it has ended.
            MasterUnreachableError: the master did not answer.
        """
        found = self._known()
        if role not in found.roles:
            raise UsageError(f"job {found.job_id} has no role {role!r}.{_hint(role, found)}")
        return OutsideGroup(self, role, found.roles[role])

    def worker(self, name: str) -> OutsideWorker:
        """Return a worker by its full name, by ``role-rank``, or, for a role with one worker, by the role's name.

        Raises:
            UsageError: (a ValueError) the job has no such worker, or the role has several.
            RefusedError, MasterUnreachableError: as for `group`.
        """
        found = self._known()
        if name in found.roles:
            names = found.roles[name]
            if len(names) != 1:
                raise UsageError(
                    f"role {name} of job {found.job_id} has {len(names)} workers: name one, such as {name}-0, or call "
                    "all of them as a group."
                )
            return OutsideWorker(self, names[0], name, 0)
        for role, names in found.roles.items():
            if name in names:
                return OutsideWorker(self, name, role, names.index(name))
        try:
            role, rank = parse_worker(name)
        except UsageError:
            role, rank = name, -1
        names = found.roles.get(role, [])
        if not 0 <= rank < len(names):
            reason = f" Role {role} has ranks 0 to {len(names) - 1}." if names else _hint(role, found)
            raise UsageError(f"job {found.job_id} has no worker {name!r}.{reason}")
        return OutsideWorker(self, names[rank], role, rank)

    def call(
        self,
        targets: Sequence[str],
        method: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        timeout: float | None,
    ) -> list[RpcFuture[Any]]:
        """Call a method of these workers (full names)."""
        bus = self._started()
        futures = bus.call_many(targets, method, args, kwargs, timeout=DEADLINE_S if timeout is None else timeout)
        for future in futures:
            self._open.add(future)
            future.on_end(self._open.discard)
        self._timer.set(time.monotonic() + REFRESH_S)
        return futures

    def close(self) -> None:
        """End open calls with RpcCancelledError. The connection stays open: it belongs to its owner."""
        with self._lock:
            bus, self._bus = self._bus, None
            self._is_closed = True
        self._timer.close(timeout_s=0.0)
        if bus is not None:
            bus.close()

    def _known(self) -> JobDirectory:
        with self._lock:
            return self._asked()

    def _asked(self) -> JobDirectory:
        """Ask the master for the directory. The caller holds the lock."""
        revision = -1 if self._directory is None else self._directory.revision
        found = self._connection.ask(GetDirectory(job=self._job, after_revision=revision), JobDirectory)
        self._asked_at = time.monotonic()
        self._job = found.job_id  # the name may mean another job later
        if found.entries is None and self._directory is not None:
            found = replace(found, entries=self._directory.entries)
        elif self._bus is not None:
            self._bus.update_directory(found.entries or [])
        self._directory = found
        return found

    def _started(self) -> BusEndpoint:
        with self._lock:
            if self._is_closed:
                raise UsageError("this JobHandle was closed: calls need one that is open.")
            is_fresh = time.monotonic() - self._asked_at < REFRESH_S
            found = self._directory if self._directory is not None and is_fresh else self._asked()
            if self._bus is not None:
                return self._bus
            if not found.relay:
                raise ClusterError("the master has no bus relay, through which calls from outside a job go.")
            bus = BusEndpoint(
                BusIdentity(
                    job=found.job_id, worker=f"{OUTSIDE}{_me()}", incarnation=0, node=socket.gethostname(), host=""
                ),
                BusNetwork(run_dir="", address="", relay=found.relay, route="relay", key=self._connection.key),
                registry=MethodRegistry({_PING: bool}),
            )
            try:
                _meet_relay(bus, found.relay)
            except BaseException:
                bus.close()
                raise
            bus.update_directory(found.entries or [])
            self._bus = bus
            return bus

    def _refresh(self) -> None:
        """While calls are open, learn which workers have died or have a new incarnation."""
        if not self._open:
            return
        try:
            self._known()
        except UnifiedError as error:  # the job has ended, or the master is away: then deadlines end the calls
            self._on_no_news(error)
        self._timer.set(time.monotonic() + REFRESH_S)

    def _on_no_news(self, error: UnifiedError) -> None:
        bus, found = self._bus, self._directory
        if bus is None or found is None or getattr(error, "code", "") != "ended":
            return
        incarnations = [(name, bus.directory.get(name)) for names in found.roles.values() for name in names]
        bus.update_directory(
            [
                DirectoryEntry(
                    worker=name,
                    incarnation=0 if incarnation is None else incarnation.incarnation,
                    state=Reachability.ENDED,
                    reason=str(error),
                )
                for name, incarnation in incarnations
            ]
        )


def _meet_relay(bus: BusEndpoint, relay: str) -> None:
    """Wait until the relay knows this inbox, because it drops answers before that."""
    inbox: Inbox = bus.start()
    bus.open()
    bus.update_directory([DirectoryEntry(worker=bus.worker, incarnation=0, state=Reachability.ALIVE, inbox=inbox)])
    try:
        bus.call(bus.worker, _PING, (), {}, timeout=RELAY_WITHIN_S).result()
    except RpcError:
        raise ClusterError(
            f"the bus relay at {relay} did not answer within {RELAY_WITHIN_S:g} s. Calls from outside a job go through "
            "it: does its port (--relay-bind of the master) let this host connect?"
        ) from None


def _me() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # this host knows no user with that uid
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}-{os.getpid()}"


def _hint(role: str, found: JobDirectory) -> str:
    return nearest(role, found.roles) or f" Its roles are {', '.join(found.roles)}."
