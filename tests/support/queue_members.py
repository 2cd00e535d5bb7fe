"""Workers that share queues, all in this process: real endpoints, real names, and a master of a few lines."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from msgspec.structs import replace

from tests.support.bus import HOST_ID
from tests.support.deadlines import met
from unified.bus.calls.registry import MethodRegistry
from unified.bus.endpoint import BusEndpoint
from unified.bus.identity import BusIdentity, BusNetwork
from unified.protocol.records import DirectoryEntry, Inbox, JournalPlace, NameClaims, NameRefusal, Reachability
from unified.queue.client import DataQueue
from unified.queue.server import host_of
from unified.worker.context import Worker, set_current_worker
from unified.worker.names import Names

DEADLINE_S = met(100.0)


def begun(work: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
    """What it returns, on a thread that nobody waits for at the end."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work, *arguments, **options)
    pool.shutdown(wait=False)
    return future


class Member:
    """One incarnation of a worker: as much of `current_worker()` as a queue uses."""

    def __init__(self, world: QueueWorld, name: str, incarnation: int) -> None:
        self.world = world
        self.incarnation = incarnation
        self.bus = BusEndpoint(
            BusIdentity(job="job-1", worker=name, incarnation=incarnation, node="n1", host=HOST_ID),
            BusNetwork(run_dir=str(world.run_dir), address="127.0.0.1", relay=world.relay, route=world.route),
            registry=MethodRegistry(),
        )
        self.names = Names(
            job_id="job-1",
            worker=name,
            incarnation=incarnation,
            directory=self.bus.directory,
            say=lambda claims: world.said.put((self, claims)),
        )
        self.bus.on_directory(self.names.learn)
        self.log_file = str(world.run_dir.parent / "logs" / name / f"{incarnation}.err")
        self.actor_info = SimpleNamespace(name=name)
        self.finishers: list[Any] = []
        self.entry = DirectoryEntry(
            worker=name, incarnation=incarnation, state=Reachability.ALIVE, inbox=self.bus.start(), node="n1"
        )
        self.bus.open()

    def on_finish(self, callback: Any) -> None:
        if callback not in self.finishers:
            self.finishers.append(callback)

    def queue(self, name: str = "q", is_master: bool = False, size: int = 1000, **options: Any) -> DataQueue[Any]:
        set_current_worker(cast(Worker, self))
        try:
            return DataQueue(name, is_master, size, **options)
        finally:
            set_current_worker(None)

    def learn(self, entries: list[DirectoryEntry]) -> None:
        self.bus.update_directory(entries)

    def stop(self) -> None:
        self.bus.close()
        for service in host_of(self.bus)._services.values():
            service.shut_down()  # a process that ends lets go of a journal; here it is to be told

    def die(self, reason: str = "killed by SIGKILL", *, is_final: bool = False) -> None:
        """Its endpoint goes, and all others are told."""
        self.world.end(self, Reachability.ENDED if is_final else Reachability.DEAD, reason)


class QueueWorld:
    """Members, and what a master tells them: who lives, and who has which name."""

    def __init__(self, run_dir: Path, route: str, relay: str) -> None:
        self.run_dir = run_dir
        self.route = route
        self.relay = relay
        self.members: list[Member] = []
        self.entries: dict[str, DirectoryEntry] = {}
        self.journals: dict[str, JournalPlace] = {}
        self.said: queue.SimpleQueue[tuple[Member, NameClaims] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._decide, name="fake-master")
        self._thread.start()

    def add(self, name: str, inbox: Inbox, names: dict[str, int]) -> None:
        """A worker in another process, which holds these names."""
        with self._lock:
            self.entries[name] = DirectoryEntry(
                worker=name, incarnation=0, state=Reachability.ALIVE, inbox=inbox, node="n1", names=names
            )
            self._tell(self.entries[name])

    def worker(self, name: str, incarnation: int = 0) -> Member:
        member = Member(self, name, incarnation)
        with self._lock:
            self.members.append(member)
            self.entries[name] = member.entry
            member.learn(list(self.entries.values()))
            self._tell(member.entry)
        return member

    def end(self, member: Member, state: Reachability, reason: str) -> None:
        member.stop()
        with self._lock:
            self.members.remove(member)
            entry = replace(member.entry, state=state, reason=reason, names={}, refused={}, inbox=None)
            self.entries[entry.worker] = entry
            self._tell(entry)

    def close(self) -> None:
        self.said.put(None)
        self._thread.join()
        for member in self.members:
            member.stop()

    def _decide(self) -> None:
        while (said := self.said.get()) is not None:
            member, claims = said
            with self._lock:
                if member not in self.members:
                    continue
                held = {name: entry.worker for entry in self.entries.values() for name in entry.names}
                names, refused = {}, {}
                for name, number in claims.names.items():
                    holder = held.get(name, member.entry.worker)
                    if holder == member.entry.worker:
                        names[name] = number
                    else:
                        refused[name] = NameRefusal(number=number, holder=holder)
                for name, path in claims.journals.items():
                    self.journals[name] = JournalPlace(node=member.entry.node, path=path)
                entry = replace(
                    member.entry,
                    names=names,
                    refused=refused,
                    journals={name: self.journals[name] for name in names if name in self.journals},
                    revision=member.entry.revision + 1,
                )
                member.entry = self.entries[entry.worker] = entry
                self._tell(entry)

    def _tell(self, entry: DirectoryEntry) -> None:
        for each in self.members:
            each.learn([entry])
