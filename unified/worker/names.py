"""`current_worker().names`: names that a worker claims in its job, so that others find whoever holds them.

The master decides: the first to claim a name holds it while its life lasts, and anybody else's claim is refused. The
answer, and who holds what, come with the job's directory, so that a look-up costs no message. `NameTable` is pure: news
in, changes out.

A claim has a number, and the master's answer carries it, so that an answer that is late, doubled or meant for an
earlier claim of the same name is never taken for this one's.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from unified.errors import RpcTimeoutError, UsageError
from unified.protocol.records import (
    MAX_NAME_LENGTH,
    MAX_NAMES,
    DirectoryEntry,
    NameClaims,
    Reachability,
    WorkerIncarnation,
)

_RANK = {Reachability.ALIVE: 0, Reachability.DEAD: 1, Reachability.ENDED: 2}


class NameChanged(NamedTuple):
    """A name has another holder than before; None: it has none."""

    name: str
    holder: WorkerIncarnation | None


class Claim:
    """One claim of this worker. Neither granted nor refused: there is no answer yet."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_granted = False
        self.refusal = ""
        """Why there will be no grant, as half a sentence."""
        self.num_waiting = 0
        """Threads that wait for the answer."""

    @property
    def is_answered(self) -> bool:
        return self.is_granted or bool(self.refusal)


class _Life(NamedTuple):
    """What is remembered of a directory entry."""

    weight: tuple[int, int, int]
    names: dict[str, int]


class NameTable:
    """The names of one job.

    Args:
        worker, incarnation: the life that this is the table of.
    """

    def __init__(self, worker: str, incarnation: int) -> None:
        self._self = WorkerIncarnation(worker, incarnation)
        self._lives: dict[str, _Life] = {}
        self._holders: dict[str, WorkerIncarnation] = {}
        self._claims: dict[str, Claim] = {}
        self._number = 0
        self._end = ""
        """Why nothing can be claimed any more."""

    @property
    def claims(self) -> NameClaims:
        """The set to tell the agent: a higher number than before means that it changed."""
        return NameClaims(number=self._number, names={name: claim.number for name, claim in self._claims.items()})

    def holder(self, name: str) -> WorkerIncarnation | None:
        return self._holders.get(name)

    def claim(self, name: str) -> Claim:
        """The claim of a name, made now unless it stands already. An answer comes with `learn`.

        Raises:
            UsageError: the name is empty or too long, or there are too many.
        """
        if name in self._claims:
            return self._claims[name]
        if not name or len(name) > MAX_NAME_LENGTH:
            raise UsageError(
                f"worker {self._self.worker} cannot claim the name {name[:40]!r}{'…' if name[40:] else ''}: "
                f"a name has 1 to {MAX_NAME_LENGTH} characters, this one {len(name)}."
            )
        if len(self._claims) >= MAX_NAMES:
            raise UsageError(
                f"worker {self._self.worker} cannot claim the name {name!r}: it has {len(self._claims)} already, and "
                "no worker may have more. Release some."
            )
        self._number += 1
        claim = self._claims[name] = Claim(self._number)
        claim.refusal = self._end
        return claim

    def withdraw(self, name: str, why: str = "") -> bool:
        """Claim or hold the name no longer; whether it was claimed or held. `why` is told to whoever waits for it."""
        claim = self._claims.pop(name, None)
        if claim is None:
            return False
        self._number += 1
        if not claim.is_answered:
            claim.refusal = why
        return True

    def learn(self, entries: Iterable[DirectoryEntry]) -> list[NameChanged]:
        """Take news of the directory in: in any order, and again, they lead to the same.

        A claim that was refused or ended is withdrawn here, so that the name can be claimed anew.
        """
        touched: dict[str, WorkerIncarnation | None] = {}
        for entry in entries:
            old = self._lives.get(entry.worker)
            weight = (entry.incarnation, _RANK[entry.state], entry.revision)
            if old is not None and weight <= old.weight:
                continue
            names = entry.names if entry.state is Reachability.ALIVE else {}
            self._lives[entry.worker] = _Life(weight, names)
            for name in {*names, *(old.names if old is not None else ())}:
                touched.setdefault(name, self._holders.get(name))
                self._move(name, WorkerIncarnation(entry.worker, entry.incarnation), holds=name in names)
            if (entry.worker, entry.incarnation) == self._self:
                self._answer(entry)
        return [
            NameChanged(name, holder)
            for name, before in touched.items()
            if (holder := self._holders.get(name)) != before
        ]

    def _move(self, name: str, life: WorkerIncarnation, *, holds: bool) -> None:
        """Of two that seem to hold it, because one was told before the other's loss, the one told last does."""
        if holds:
            self._holders[name] = life
        elif name in self._holders and self._holders[name].worker == life.worker:
            del self._holders[name]

    def _answer(self, entry: DirectoryEntry) -> None:
        if entry.state is not Reachability.ALIVE and not self._end:
            why = entry.reason or "no reason given"
            self._end = f"the master has ended life {entry.incarnation} of this worker ({why})"
        for name, claim in list(self._claims.items()):
            refusal = entry.refused.get(name)
            if self._end:
                claim.refusal = claim.refusal or self._end
            elif entry.names.get(name) == claim.number:
                claim.is_granted = True
            elif refusal is not None and refusal.number == claim.number:
                claim.refusal = f"it is held by worker {refusal.holder}"
            if claim.refusal:
                self.withdraw(name)


Watcher = Callable[[str, WorkerIncarnation | None], None]


class Names:
    """The names of this worker's job. Every method but `learn` is for any thread.

    Args:
        job_id, worker, incarnation: whose names these are.
        say: takes the whole set of claims to the agent; an older set that comes after a newer one is ignored there.
    """

    def __init__(self, *, job_id: str, worker: str, incarnation: int, say: Callable[[NameClaims], None]) -> None:
        self._job_id = job_id
        self._worker = worker
        self._say = say
        self._table = NameTable(worker, incarnation)
        self._news = threading.Condition()
        self._said = 0
        self._watchers: list[Watcher] = []
        self._learning_thread = 0
        self._pid = os.getpid()

    def claim(self, name: str, timeout_s: float = 60.0) -> None:
        """Hold `name` from now on, until `release` or the end of this life. Blocks until the master has agreed.

        A name that this life holds already is no error. The worker's next life has to claim its names again.

        Args:
            name: 1 to 200 characters; at most 1000 names a worker.
            timeout_s: how long to wait for the master's answer, in seconds. It takes milliseconds, but for a master
                that is being restarted, and while the job's other workers have not all started.

        Raises:
            UsageError: another worker holds the name; or it cannot be a name; or this is no place to wait.
            RpcTimeoutError: no answer came in time; the claim is withdrawn.
        """
        self._check_may_wait("claim a name")
        with self._news:
            claim = self._table.claim(name)
            with self._waiting_for(name, claim):
                self._tell_agent()
                self._wait(lambda: claim.is_answered, timeout_s)
        if claim.refusal:
            text = f"worker {self._worker} cannot claim the name {name!r} in job {self._job_id}: {claim.refusal}."
            raise UsageError(text)
        if not claim.is_granted:
            raise RpcTimeoutError(
                f"worker {self._worker} claimed the name {name!r} in job {self._job_id}, had no answer within "
                f"{timeout_s:g} s, and gave up. The master answers once all workers of the job have started; "
                "`unified status` tells whether it can be reached and what it waits for."
            )

    def release(self, name: str) -> None:
        """Hold `name` no longer. Returns at once: it is free for others when the master has heard of it.

        A name that this worker has not claimed is no error.
        """
        self._check_process()
        with self._news:
            if self._table.withdraw(name, "it was released while its claim waited for an answer"):
                self._tell_agent()
                self._news.notify_all()

    def find(self, name: str, timeout_s: float | None = None) -> str:
        """Full name of the worker that holds `name`; waits until there is one.

        Args:
            timeout_s: in seconds; None: as long as this worker lives.

        Raises:
            RpcTimeoutError: nobody has claimed it in time.
            UsageError: this is no place to wait.
        """
        if (holder := self.holder(name)) is not None:
            return holder.worker
        self._check_may_wait("wait for a name")
        with self._news:
            self._wait(lambda: self._table.holder(name) is not None, timeout_s)
            holder = self._table.holder(name)
        if holder is None:
            raise RpcTimeoutError(
                f"worker {self._worker} waited {timeout_s:g} s for the holder of the name {name!r}, and no living "
                f"worker of job {self._job_id} has claimed it: see whether the one that should is running (`unified "
                "status`), and whether both spell the name alike."
            )
        return holder.worker

    def holder(self, name: str) -> WorkerIncarnation | None:
        """(worker, incarnation) of the life that holds `name`, as far as is known here; None if there is none."""
        return self._table.holder(name)

    def on_change(self, callback: Watcher) -> Callable[[], None]:
        """Have ``callback(name, holder)`` called whenever a name of the job gets another holder, or loses it (None).

        Death of the holder's life is a loss; its next life, once it claims the name, is another holder. The callback
        runs in the thread that reads the agent's orders: it must be quick, and can neither claim nor wait for a name.
        What it raises is printed.

        Ask `holder` after this for what is true already.

        Returns:
            A function without arguments that ends the calls.
        """
        self._check_process()
        with self._news:
            self._watchers.append(callback)

        def stop() -> None:
            with self._news:
                if callback in self._watchers:
                    self._watchers.remove(callback)

        return stop

    def learn(self, entries: Iterable[DirectoryEntry]) -> None:
        """Take news of the directory in: for the runtime, from one thread at a time."""
        with self._news:
            changes = self._table.learn(entries)
            watchers = list(self._watchers)
            self._news.notify_all()
        self._learning_thread = threading.get_ident()
        try:
            for change in changes:
                for watcher in watchers:
                    _call(watcher, change)
        finally:
            self._learning_thread = 0

    def _tell_agent(self) -> None:
        """Say the claims if they have changed. Holds the lock: an agent that is gone ends the process."""
        claims = self._table.claims
        if claims.number > self._said:
            self._said = claims.number
            self._say(claims)

    def _wait(self, is_true: Callable[[], bool], timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not is_true():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            self._news.wait(left)

    @contextmanager
    def _waiting_for(self, name: str, claim: Claim) -> Iterator[None]:
        """At the end of the wait, however it ends, a claim for which nobody waits any more is withdrawn."""
        claim.num_waiting += 1
        try:
            yield
        finally:
            claim.num_waiting -= 1
            if not claim.is_answered and not claim.num_waiting:
                self._table.withdraw(name)
            self._tell_agent()

    def _check_may_wait(self, what: str) -> None:
        self._check_process()
        if threading.get_ident() == self._learning_thread:
            raise UsageError(
                f"worker {self._worker} cannot {what} in an on_change callback: the answer would come through the very "
                "thread that waits for it. Do it in a thread of your own."
            )

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"the names of worker {self._worker} belong to process {self._pid}: this one ({os.getpid()}) was "
                "forked from it and hears of no change. Use them in the worker itself."
            )


def _call(watcher: Watcher, change: NameChanged) -> None:
    try:
        watcher(change.name, change.holder)
    except Exception:  # the others, and the news that follow, are still owed their turn
        traceback.print_exc()
