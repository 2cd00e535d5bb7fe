"""`current_worker().names`: names that a worker claims in its job, so that others find their holders.

The master decides: the first worker to claim a name holds it while its incarnation lasts, and other claims are refused.
Answers and holders come with the job's directory, so that a look-up costs no message.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from unified.core.directory import Change, NameMoved, WorkerDirectory
from unified.errors import RpcTimeoutError, UsageError
from unified.job.driver import is_text
from unified.protocol import records

Watcher = Callable[[str, records.WorkerIncarnation | None], None]


@dataclass
class NameClaim:
    """One claim of this worker, neither granted nor refused until the answer comes."""

    number: int
    is_granted: bool = False
    refusal: str = ""
    """Reason why there will be no grant, as half a sentence."""
    num_waiting: int = 0

    @property
    def is_answered(self) -> bool:
        return self.is_granted or bool(self.refusal)


class ClaimTable:
    """Names that one incarnation claims, with the answer to each claim. Pure.

    Each claim has a number, which the master's answer carries. A late or repeated answer to an earlier claim of the
    name is therefore never taken for the answer to this one.
    """

    def __init__(self, worker: str, incarnation: int) -> None:
        self._worker = worker
        self._incarnation = incarnation
        self._claims: dict[str, NameClaim] = {}
        self._journals: dict[str, str] = {}
        self._number = 0
        self._end = ""
        """Reason why nothing can be claimed any more."""

    @property
    def claims(self) -> records.NameClaims:
        """The claims to send to the agent; their number rises with each change."""
        names = {name: claim.number for name, claim in self._claims.items()}
        return records.NameClaims(number=self._number, names=names, journals=dict(self._journals))

    def claim(self, name: str) -> NameClaim:
        """Return the claim of a name, made now unless it exists. `answer` takes in the master's answer to it."""
        if name in self._claims:
            return self._claims[name]
        if not name or len(name) > records.MAX_NAME_LENGTH:
            raise UsageError(
                f"worker {self._worker} cannot claim the name {name[:40]!r}{'…' if name[40:] else ''}: "
                f"a name has 1 to {records.MAX_NAME_LENGTH} characters, this one {len(name)}."
            )
        if not is_text(name):
            raise UsageError(f"worker {self._worker} cannot claim the name {name!r}: it cannot be written in UTF-8.")
        if len(self._claims) >= records.MAX_NAMES:
            raise UsageError(
                f"worker {self._worker} cannot claim the name {name!r}: it has {len(self._claims)} already, and "
                "no worker may have more. Release some."
            )
        self._number += 1
        claim = self._claims[name] = NameClaim(self._number)
        claim.refusal = self._end
        return claim

    def keep_journal(self, name: str, path: str) -> None:
        """Record where the file of a held name is."""
        if name in self._claims and self._journals.get(name) != path:
            self._journals[name] = path
            self._number += 1

    def drop(self, name: str, why: str = "") -> bool:
        """Drop the name; return True if it was claimed or held. Threads that wait for it get the refusal `why`."""
        claim = self._claims.pop(name, None)
        if claim is None:
            return False
        self._journals.pop(name, None)
        self._number += 1
        if not claim.is_answered:
            claim.refusal = why
        return True

    def answer(self, entry: records.DirectoryEntry) -> None:
        """Take in what the directory says of this worker.

        A claim that was refused or ended is dropped here, so that the name can be claimed anew.
        """
        if entry.incarnation < self._incarnation:
            return
        is_next = entry.incarnation > self._incarnation
        if not self._end and (is_next or entry.state is not records.Reachability.ALIVE):
            why = f"incarnation {entry.incarnation} took its place" if is_next else entry.reason or "no reason given"
            self._end = f"the master has ended incarnation {self._incarnation} of this worker ({why})"
        for name, claim in list(self._claims.items()):
            refusal = entry.refused.get(name)
            if self._end:
                claim.refusal = claim.refusal or self._end
            elif entry.names.get(name) == claim.number:
                claim.is_granted = True
            elif refusal is not None and refusal.number == claim.number:
                claim.refusal = f"it is held by worker {refusal.holder}"
            if claim.refusal:
                self.drop(name)


class Names:
    """The names of this worker's job. Every method except `learn` is for any thread.

    Args:
        directory: says who holds which name, and what the master answers.
        say: sends the whole set of claims to the agent, which ignores a set older than the last.
    """

    def __init__(
        self,
        *,
        job_id: str,
        worker: str,
        incarnation: int,
        directory: WorkerDirectory,
        say: Callable[[records.NameClaims], None],
    ) -> None:
        self._job_id = job_id
        self._worker = worker
        self._say = say
        self._directory = directory
        self._answered: records.DirectoryEntry | None = None
        self._table = ClaimTable(worker, incarnation)
        self._news = threading.Condition()
        self._said = 0
        self._watchers: list[Watcher] = []
        self._learning_thread = 0
        self._pid = os.getpid()

    def claim(self, name: str, timeout_s: float = 60.0) -> None:
        """Hold `name` from now on, until `release` or the end of this incarnation. Blocks until the master has agreed.

        A name that this incarnation holds already is no error. The next incarnation has to claim its names again.

        Args:
            name: 1 to 200 characters; at most 1000 names a worker.
            timeout_s: how long to wait for the master's answer, in seconds. It takes milliseconds; longer while the
                master is being restarted, and until all workers of the job have started.

        Raises:
            UsageError: another worker holds the name; or it cannot be a name; or an `on_change` callback or a forked
                process calls this.
            RpcTimeoutError: no answer came in time; the claim is dropped.
        """
        self._check_may_wait("claim a name")
        with self._news:
            claim = self._table.claim(name)
            with self._waiting_for(name, claim):
                self._tell_agent()
                self._news.wait_for(lambda: claim.is_answered, timeout_s)
        if claim.refusal:
            text = f"worker {self._worker} cannot claim the name {name!r} in job {self._job_id}: {claim.refusal}."
            raise UsageError(text)
        if not claim.is_granted:
            raise RpcTimeoutError(
                f"worker {self._worker} claimed the name {name!r} in job {self._job_id}, had no answer within "
                f"{timeout_s:g} s, and gave up. The master answers once all workers of the job have started; "
                "`unified status` tells whether it can be reached and what it waits for."
            )

    def journal(self, name: str) -> records.JournalPlace | None:
        """Return the last place of the file of a name that this incarnation holds; None: nowhere. For the runtime."""
        return self._answered.journals.get(name) if self._answered is not None else None

    def keep_journal(self, name: str, path: str, timeout_s: float) -> None:
        """Have the master remember the file of a name that this incarnation holds, on this node; return when it does.

        Raises:
            RpcTimeoutError: the master did not confirm it in time.
        """
        self._check_may_wait("keep a journal")

        def is_kept() -> bool:
            answered, place = self._answered, self.journal(name)
            return answered is not None and place == records.JournalPlace(node=answered.node, path=path)

        with self._news:
            if not is_kept():
                self._table.keep_journal(name, path)
                self._tell_agent()
            if not self._news.wait_for(is_kept, timeout_s):
                raise RpcTimeoutError(
                    f"worker {self._worker} told the master that the file of {name!r} is {path}, and had no answer "
                    f"within {timeout_s:g} s: `unified status` tells whether it can be reached."
                )

    def release(self, name: str) -> None:
        """Release `name`. Returns at once; others can claim the name when the master has heard of it.

        A name that this worker has not claimed is no error.
        """
        self._check_process()
        with self._news:
            if self._table.drop(name, "it was released while its claim waited for an answer"):
                self._tell_agent()
                self._news.notify_all()

    def find(self, name: str, timeout_s: float | None = None) -> str:
        """Return the full name of the worker that holds `name`; waits until there is one.

        Args:
            timeout_s: in seconds; None: no limit.

        Raises:
            RpcTimeoutError: nobody has claimed the name in time.
            UsageError: an `on_change` callback or a forked process calls this.
        """
        if (holder := self.holder(name)) is not None:
            return holder.worker
        self._check_may_wait("wait for a name")
        with self._news:
            holder = self._news.wait_for(lambda: self._directory.holder(name), timeout_s)
        if holder is None:
            raise RpcTimeoutError(
                f"worker {self._worker} waited {timeout_s:g} s for the holder of the name {name!r}, and no living "
                f"worker of job {self._job_id} has claimed it: check that the worker that should claim it is "
                "running (`unified status`), and that both use the same name."
            )
        return holder.worker

    def holder(self, name: str) -> records.WorkerIncarnation | None:
        """Return (worker, incarnation) of the holder of `name`, as far as this worker knows; None if there is none."""
        return self._directory.holder(name)

    def on_change(self, callback: Watcher) -> Callable[[], None]:
        """Have ``callback(name, holder)`` called whenever a name of the job gets another holder, or loses it (None).

        Death of the holder is a loss; its next incarnation, once it claims the name, is another holder. The callback
        runs in the thread that reads the agent's orders: it must be quick, and can neither claim nor wait for a name.
        Its exceptions are printed.

        Call `holder` afterwards for the present holder.

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

    def learn(self, changes: Iterable[Change]) -> None:
        """Take in what has changed in the directory: for the runtime, from one thread at a time."""
        entry = self._directory.get(self._worker)
        with self._news:
            if entry is not None and entry is not self._answered:
                self._answered = entry
                self._table.answer(entry)
            watchers = list(self._watchers)
            self._news.notify_all()
        self._learning_thread = threading.get_ident()
        try:
            for change in changes:
                if isinstance(change, NameMoved):
                    for watcher in watchers:
                        _call(watcher, change)
        finally:
            self._learning_thread = 0

    def _tell_agent(self) -> None:
        """Send the claims if they have changed. The lock is held: without an agent the process ends anyway."""
        claims = self._table.claims
        if claims.number > self._said:
            self._said = claims.number
            self._say(claims)

    @contextmanager
    def _waiting_for(self, name: str, claim: NameClaim) -> Iterator[None]:
        """Withdraw an unanswered claim when the last thread ends its wait."""
        claim.num_waiting += 1
        try:
            yield
        finally:
            claim.num_waiting -= 1
            if not claim.is_answered and not claim.num_waiting:
                self._table.drop(name)
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


def _call(watcher: Watcher, change: NameMoved) -> None:
    try:
        watcher(change.name, change.holder)
    except Exception:  # the other watchers and later changes still have to be served
        traceback.print_exc()
