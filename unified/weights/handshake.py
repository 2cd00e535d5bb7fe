"""The handshake between rank 0 of the senders and the receivers, before and after the buckets."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from random import SystemRandom
from typing import TYPE_CHECKING, Any, NamedTuple

from unified.bus.calls.future import RpcFuture
from unified.bus.endpoint import BusEndpoint
from unified.bus.shm.pool import default_limit
from unified.core.backoff import Backoff
from unified.errors import RpcError, RpcNotFoundError, WeightsError, WeightsTimeoutError, WeightsVersionError
from unified.protocol.records import WorkerIncarnation
from unified.weights.state_dict import OutgoingStateDict
from unified.weights.transfer_plan import Bucket, TransferPlan, tree
from unified.weights.versions import ENDED, GONE, LATE, LOST, TransferFailure, failure_of

if TYPE_CHECKING:
    import torch

    from unified.rounds.rank_group import Ranks

AGAIN = Backoff(first_s=0.005, limit_s=0.25, num_free=0)
ANSWER_S = 5.0
"""Seconds for a short message and its answer."""
MAX_HOLDERS = 4
"""Members that a worker, which was left out, is told of: the next one is for the case that the one before dies."""
SHARED_FRACTION = 0.25
"""Share of a process's shared memory up to which a version may stay there until the next one: with the next one, and
one that a slow reader keeps, a quarter stays free. Receivers copy a larger version as it comes."""


def method(name: str, verb: str) -> str:
    """Return the name under which a receiver's handler is registered."""
    return f"unified.weights.{name}.{verb}"


def call_incarnations(
    bus: BusEndpoint, targets: Sequence[WorkerIncarnation], method: str, args: Sequence[Any], *, timeout: float
) -> list[RpcFuture[Any]]:
    """Call exactly these incarnations of workers. The arguments are encoded once.

    Raises:
        RpcTimeoutError: too many bytes were in flight until the deadline.
    """
    names, incarnations = [each.worker for each in targets], [each.number for each in targets]
    return bus.call_many(names, method, args, {}, timeout=timeout, incarnations=incarnations)


class Attempt(NamedTuple):
    """A version that receivers expect."""

    plan: TransferPlan
    roots: tuple[WorkerIncarnation, ...]
    """Workers that the buckets are sent to."""
    receivers: tuple[WorkerIncarnation, ...]
    """All workers that will have the buckets."""
    failures: dict[str, TransferFailure]
    """Failures of workers that were lost meanwhile."""
    left_out: dict[str, str] = {}
    """Workers that do not get the version, because they have no receiver now, and why."""


class SyncOptions(NamedTuple):
    """Options of `RoleGroup.sync_weights`, which describes them."""

    version: int | None
    dtype: torch.dtype | None
    bucket_bytes: int
    timeout: float
    wait: bool
    force: bool = False
    collective: bool | None = None
    require: int = 1
    is_catch_up: bool = False
    """A member of the role sends the version that it has."""


class SendTask(NamedTuple):
    """One version that the ranks of a model send together, or one process alone."""

    source: OutgoingStateDict
    buckets: tuple[Bucket, ...]
    senders: tuple[WorkerIncarnation, ...]
    ranks: Ranks
    options: SyncOptions
    deadline: float


class Handshake(NamedTuple):
    """The handshake with the receivers called `name`."""

    bus: BusEndpoint
    name: str
    what: str
    """The weights and the group in words."""
    node: str

    def begin(
        self, task: SendTask, targets: Mapping[str, str], version: int | None, last: int, require: int
    ) -> Attempt:
        """Find the receivers, choose the version, and announce it to them.

        Args:
            targets: node of each worker; empty: not known.
            version: None: one above the newest version of any receiver, and above `last`.
            require: wait for so many receivers, and leave out the workers that have none then; 0 or less: do not wait.
        """
        versions, receivers, left_out = self._find(list(targets), require, task.deadline)
        newest = max(versions.values(), default=0)
        if version is None:
            version = max(newest, last) + 1
        elif version < newest and not task.options.force:
            there = next(worker for worker, each in versions.items() if each == newest)
            raise WeightsVersionError(
                f"version {version} of {self.what} was not sent: worker {there} has version {newest}, and versions "
                "must increase. Omit version= for the next one, or give force=True to go back."
            )
        roots, children = tree(receivers, targets, self.node)
        plan = TransferPlan(
            session=secrets.token_hex(8),
            version=version,
            buckets=task.buckets,
            keys=task.source.keys,
            aliases=task.source.aliases,
            others=task.source.others,
            metadata=task.source.metadata,
            senders=task.senders,
            children=children,
            stays_shared=_can_stay_shared(task.buckets, is_passed_on=bool(children)),
            timeout_s=left_s(task.deadline),
            force=task.options.force,
            is_catch_up=task.options.is_catch_up,
        )
        attempt = Attempt(plan, tuple(roots), tuple(receivers), {}, left_out)
        refusals: dict[str, str] = {}
        for worker, answer in self._ask(receivers, "begin", [plan], task.deadline).items():
            if isinstance(answer, TransferFailure):
                attempt.failures[worker] = answer
            elif answer:
                refusals[worker] = answer
        if refusals:
            worker, reason = next(iter(refusals.items()))
            self.abort(attempt, [each.worker for each in receivers], f"worker {worker} refused it: {reason}")
            raise WeightsVersionError(
                f"version {version} of {self.what} was not sent: worker {worker} refuses it, because {reason}. "
                "(If all ranks of a role call sync_weights with the same model, say collective=True.)"
            )
        return attempt

    def finish(
        self, attempt: Attempt, failures: Mapping[str, TransferFailure], deadline: float
    ) -> dict[str, TransferFailure]:
        """Let every receiver that has all buckets publish the version; return the failures by worker.

        Called once every bucket was answered.
        """
        failed = dict(failures)
        self.abort(attempt, failed, "its sender could not deliver all buckets")
        whole = [each for each in attempt.receivers if each.worker not in failed]
        answers = self._ask(whole, "commit", [attempt.plan.session], deadline)
        return failed | {worker: answer for worker, answer in answers.items() if isinstance(answer, TransferFailure)}

    def abort(self, attempt: Attempt, workers: Iterable[str], reason: str) -> None:
        """Tell receivers to drop the attempt, without a wait: a receiver that misses this drops it after a timeout."""
        wanted = set(workers)
        receivers = [each for each in attempt.receivers if each.worker in wanted]
        args = [attempt.plan.session, reason]
        with contextlib.suppress(RpcError):
            call_incarnations(self.bus, receivers, method(self.name, "abort"), args, timeout=ANSWER_S)

    def tell(
        self, workers: Iterable[str], version: int, holders: Sequence[WorkerIncarnation], deadline: float | None
    ) -> list[str]:
        """Tell workers that were left out who has the version; return those that have it now.

        A worker that made its receiver during the sync would answer with older weights after the sync, so this waits
        for such workers until the deadline; None: without a wait.
        """
        there = [worker for worker in workers if self.bus.directory.reachable(worker) is not None]
        args, timeout_s = [version, holders[:MAX_HOLDERS]], ANSWER_S if deadline is None else left_s(deadline)
        try:
            calls = self.bus.call_many(there, method(self.name, "news"), args, {}, timeout=timeout_s)
        except RpcError:  # too many bytes are in flight
            return []
        if deadline is None:
            for call in calls:
                call.add_done_callback(lambda done: done.exception())
            return []
        # One without a receiver asks the members when it makes one.
        done = [(worker, call) for worker, call in zip(there, calls, strict=True) if call.exception() is None]
        return [worker for worker, call in done if call.result() >= version]

    def error(self, version: int | None, failures: Mapping[str, TransferFailure]) -> WeightsError:
        """Return an error that names the workers without the version, and the reasons."""
        what = self.what if version is None else f"version {version} of {self.what}"
        texts = "".join(f"\n  {worker}: {failure.text}" for worker, failure in failures.items())
        is_late = {failure.kind for failure in failures.values()} <= {LATE, GONE}
        return (WeightsTimeoutError if is_late else WeightsError)(f"{what} did not reach:{texts}")

    def _find(
        self, targets: Sequence[str], require: int, deadline: float
    ) -> tuple[dict[str, int], list[WorkerIncarnation], dict[str, str]]:
        """Wait until `require` workers have a receiver; return the newest version and the incarnation of each.

        The last value has the other workers, and why each has no receiver.
        """
        found: dict[str, tuple[int, WorkerIncarnation]] = {}
        absent: dict[str, str] = {}
        num_tries = 0
        while True:
            self._ask_versions([worker for worker in targets if worker not in found], found, absent, deadline)
            if len(found) >= require:
                present = [worker for worker in targets if worker in found]
                left_out = {worker: absent[worker] for worker in targets if worker not in found}
                return {each: found[each][0] for each in present}, [found[each][1] for each in present], left_out
            pause_s = AGAIN.delay_s(num_tries, SystemRandom())
            num_tries += 1
            is_ended = self.bus.directory.is_ended
            rest = {
                each: TransferFailure(ENDED if is_ended(each) else GONE, absent[each])
                for each in targets
                if each not in found
            }
            num_may_come = sum(failure.kind == GONE for failure in rest.values())
            if time.monotonic() + pause_s >= deadline or len(found) + num_may_come < require:
                raise self.error(None, rest)
            time.sleep(pause_s)

    def _ask_versions(
        self,
        workers: Sequence[str],
        found: dict[str, tuple[int, WorkerIncarnation]],
        absent: dict[str, str],
        deadline: float,
    ) -> None:
        """Ask workers for their versions, and sort them into those with a receiver and those without."""
        directory = self.bus.directory
        gone = {worker: directory.why_waiting(worker) for worker in workers if directory.reachable(worker) is None}
        asked = [worker for worker in workers if worker not in gone]
        absent |= gone
        calls = self.bus.call_many(asked, method(self.name, "version"), [], {}, timeout=left_s(deadline))
        for worker, call in zip(asked, calls, strict=True):
            try:
                version, incarnation = call.result()
                found[worker] = version, WorkerIncarnation(worker, incarnation)
            except RpcNotFoundError:
                what = f"there is no WeightsReceiver({self.name!r}) there"
                absent[worker] = f"{what}; each worker of the role makes one when it starts"
            except RpcError as error:
                failure = failure_of(error)
                if failure.kind in LOST:
                    absent[worker] = failure.text
                elif failure.kind != LATE or worker not in absent:  # else the last call had little time left
                    raise self.error(None, {worker: failure}) from error

    def _ask(
        self, receivers: Sequence[WorkerIncarnation], verb: str, args: Sequence[Any], deadline: float
    ) -> dict[str, Any]:
        """Return the answers by worker, or the failure of the call."""
        answers: dict[str, Any] = {}
        calls = call_incarnations(self.bus, receivers, method(self.name, verb), args, timeout=left_s(deadline))
        for each, call in zip(receivers, calls, strict=True):
            try:
                answers[each.worker] = call.result()
            except RpcError as error:
                call.cancel()
                answers[each.worker] = failure_of(error)
        return answers


def _can_stay_shared(buckets: Sequence[Bucket], *, is_passed_on: bool) -> bool:
    """Return whether the version can stay in shared memory of the senders, or of the roots that pass it on."""
    limit = default_limit()
    if limit == 0:  # all bytes go by the wire, into memory of the receivers
        return True
    of_rank: dict[int, int] = {}
    for bucket in buckets:
        rank = 0 if is_passed_on else bucket.rank  # a root that passes buckets on has all of them
        of_rank[rank] = of_rank.get(rank, 0) + bucket.nbytes
    return max(of_rank.values(), default=0) <= SHARED_FRACTION * limit


def left_s(deadline: float) -> float:
    """Return the seconds to a deadline on the monotonic clock, above zero because a call needs that."""
    return max(deadline - time.monotonic(), 0.001)
