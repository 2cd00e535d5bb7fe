"""The handshake between rank 0 of the senders and the receivers, before and after the buckets."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from random import SystemRandom
from typing import Any, NamedTuple

from unified.bus.calls.future import RpcFuture
from unified.bus.endpoint import BusEndpoint
from unified.bus.shm.pool import default_limit
from unified.core.backoff import Backoff
from unified.errors import RpcError, RpcNotFoundError, WeightsError, WeightsTimeoutError, WeightsVersionError
from unified.protocol.records import WorkerIncarnation
from unified.weights.state_dict import OutgoingStateDict
from unified.weights.transfer_plan import Bucket, TransferPlan, tree
from unified.weights.versions import GONE, LATE, TransferFailure, failure_of

AGAIN = Backoff(first_s=0.005, limit_s=0.25, num_free=0)
ABORT_WITHIN_S = 5.0
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


class Verdict(NamedTuple):
    failures: dict[str, TransferFailure]
    again: bool
    """Another attempt may reach the workers that failed."""


class Handshake(NamedTuple):
    """The handshake with the receivers called `name`."""

    bus: BusEndpoint
    name: str
    what: str
    """The weights and the group in words."""
    node: str

    def begin(
        self,
        targets: Mapping[str, str],
        source: OutgoingStateDict,
        buckets: tuple[Bucket, ...],
        senders: tuple[WorkerIncarnation, ...],
        *,
        version: int | None,
        last: int,
        force: bool,
        deadline: float,
    ) -> Attempt:
        """Find the receivers, choose the version, and announce it to them.

        Args:
            targets: node of each worker; empty: not known.
            version: None: one above the newest version of any receiver, and above `last`.
        """
        versions, receivers = self._find(list(targets), deadline)
        newest = max(versions.values())
        if version is None:
            version = max(newest, last) + 1
        elif version < newest and not force:
            there = next(worker for worker, each in versions.items() if each == newest)
            raise WeightsVersionError(
                f"version {version} of {self.what} was not sent: worker {there} has version {newest}, and versions "
                "must increase. Omit version= for the next one, or give force=True to go back."
            )
        roots, children = tree(receivers, targets, self.node)
        plan = TransferPlan(
            session=secrets.token_hex(8),
            version=version,
            buckets=buckets,
            keys=source.keys,
            aliases=source.aliases,
            others=source.others,
            metadata=source.metadata,
            senders=senders,
            children=children,
            stays_shared=_can_stay_shared(buckets, is_passed_on=bool(children)),
            timeout_s=left_s(deadline),
            force=force,
        )
        attempt = Attempt(plan, tuple(roots), tuple(receivers), {})
        refusals: dict[str, str] = {}
        for worker, answer in self._ask(receivers, "begin", [plan], deadline).items():
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

    def finish(self, attempt: Attempt, failures: Mapping[str, TransferFailure], deadline: float) -> Verdict:
        """Let every receiver that has all buckets publish the version. Called once every bucket was answered."""
        failed = dict(failures)
        self.abort(attempt, failed, "its sender could not deliver all buckets")
        whole = [each for each in attempt.receivers if each.worker not in failed]
        answers = self._ask(whole, "commit", [attempt.plan.session], deadline)
        failed |= {worker: answer for worker, answer in answers.items() if isinstance(answer, TransferFailure)}
        may_come = all(failure.kind == GONE for failure in failed.values())
        return Verdict(failed, bool(failed) and may_come and time.monotonic() < deadline)

    def abort(self, attempt: Attempt, workers: Iterable[str], reason: str) -> None:
        """Tell receivers to drop the attempt, without a wait: a receiver that misses this drops it after a timeout."""
        wanted = set(workers)
        receivers = [each for each in attempt.receivers if each.worker in wanted]
        args = [attempt.plan.session, reason]
        with contextlib.suppress(RpcError):
            call_incarnations(self.bus, receivers, method(self.name, "abort"), args, timeout=ABORT_WITHIN_S)

    def error(self, version: int | None, failures: Mapping[str, TransferFailure]) -> WeightsError:
        """Return an error that names the workers without the version, and the reasons."""
        what = self.what if version is None else f"version {version} of {self.what}"
        texts = "".join(f"\n  {worker}: {failure.text}" for worker, failure in failures.items())
        is_late = {failure.kind for failure in failures.values()} <= {LATE, GONE}
        return (WeightsTimeoutError if is_late else WeightsError)(f"{what} did not reach:{texts}")

    def _find(self, targets: Sequence[str], deadline: float) -> tuple[dict[str, int], list[WorkerIncarnation]]:
        """Wait until each worker has a receiver; return the newest version and the incarnation of each."""
        found: dict[str, tuple[int, WorkerIncarnation]] = {}
        without: set[str] = set()
        num_tries = 0
        while True:
            missing = [worker for worker in targets if worker not in found]
            calls = self.bus.call_many(missing, method(self.name, "version"), [], {}, timeout=left_s(deadline))
            for worker, call in zip(missing, calls, strict=True):
                try:
                    version, incarnation = call.result()
                    found[worker] = version, WorkerIncarnation(worker, incarnation)
                except RpcNotFoundError:
                    without.add(worker)
                except RpcError as error:
                    failure = failure_of(error)
                    is_known = failure.kind == LATE and worker in without  # the last call had little time left
                    if failure.kind != GONE and not is_known:
                        raise self.error(None, {worker: failure}) from error
            if len(found) == len(targets):
                return {worker: found[worker][0] for worker in targets}, [found[worker][1] for worker in targets]
            pause_s = AGAIN.delay_s(num_tries, SystemRandom())
            num_tries += 1
            if time.monotonic() + pause_s >= deadline:
                names = ", ".join(worker for worker in targets if worker not in found)
                raise WeightsTimeoutError(
                    f"{self.what} did not reach {names}: there is no WeightsReceiver({self.name!r}) there. "
                    "Each worker of the role makes one when it starts."
                )
            time.sleep(pause_s)

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
