"""`@elastic(state)`: a training loop that stays in its process when its round ends, and goes on in the next."""

from __future__ import annotations

import functools
import gc
import os
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import msgspec

from unified.elastic.core.agreement import Holding, StepAgreement, agree
from unified.elastic.state import ElasticState
from unified.rounds.meeting import RoundMeeting, RoundMember
from unified.rounds.rendezvous_store import connect
from unified.worker.context import Worker
from unified.worker.rounds import RoundEnded, Rounds

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it without saying so

P = ParamSpec("P")
T = TypeVar("T")
MEET_WITHIN_S = 1800.0
"""Time for the ranks of a round to come to their loops; a replacement may first have to build a large model."""


def elastic(state: ElasticState) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function an elastic training loop.

    The function is called in every round of this process, with the process group of the round set up and `state` at the
    step from which all ranks go on. When a peer dies, the function is left by an exception from a collective, from an
    optimizer's `step()` or from `state.commit()`, and called again with the same arguments. Its result is returned once
    the functions of all ranks have returned. Other exceptions are raised.

    Outside of a worker of an elastic role it is called once, as it is.

    Args:
        state: what the loop trains, and how far it is.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            worker = state._worker
            if worker is None or worker.rounds is None or not worker.rounds.is_elastic:
                return function(*args, **kwargs)
            return _Loop(state, worker, worker.rounds).run(lambda: function(*args, **kwargs))

        return run

    return decorate


class _Loop:
    def __init__(self, state: ElasticState, worker: Worker, rounds: Rounds) -> None:
        self._state = state
        self._worker = worker
        self._rounds = rounds
        self._reason = ""
        self._broken_at = 0.0

    def run(self, body: Callable[[], T]) -> T:
        self._rounds.begin_loop()
        try:
            while True:
                try:
                    self._begin()
                    gc.freeze()  # so that the collection below sees only objects of the round, and saves 0.3 s
                    result = body()
                    self._finish()
                    return result
                except RoundEnded as ended:
                    self._note("", ended)
                except Exception as error:
                    if not self._rounds.is_broken_by(error):
                        raise
                    self._note(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}", error)
                self._state._end_round()
                gc.collect()  # a wrapper of the model has hooks in its parameters until it is gone
                self._rounds.rejoin(self._worker.device)
        finally:
            self._rounds.end_loop()

    def _note(self, text: str, error: BaseException) -> None:
        """Keep the reason for the round's end, and drop the variables of the loop."""
        self._reason = text
        self._broken_at = time.monotonic()
        traceback.clear_frames(error.__traceback__)

    def _begin(self) -> None:
        """Agree with the other ranks on a step, and bring the state to it."""
        actor, before = self._worker.actor_info, self._state.step
        holding = self._state._holding(actor.rank, self._rounds.end_reason if self._broken_at else "")
        store = _round_store()
        meeting = self._meeting(store, "begin", "begin their elastic loops")
        holdings = meeting.gather(msgspec.msgpack.encode(holding))
        agreement = msgspec.msgpack.decode(meeting.conclude(_decide(holdings)), type=StepAgreement)
        self._state.__dict__["_is_boundary"] = _Boundary(store, actor.world_size).is_reached
        self._reason = agreement.reason or self._reason
        self._state.__dict__["_on_ready"] = lambda: self._report(before)
        self._state._begin(agreement, actor.rank)

    def _report(self, before: int) -> None:
        """Report what the end of the last round has cost."""
        if not self._broken_at:
            return
        took_s, step = time.monotonic() - self._broken_at, self._state.step
        lost = max(0, before - step)
        print(
            f"unified: in round {self._worker.round} after {took_s:.2f} s, at step {step}; "
            f"{lost} committed step{'s are' if lost != 1 else ' is'} lost. "
            f"The last round ended because: {self._reason}",
            flush=True,
        )
        self._worker.report(step=step, lost_steps=lost, rejoined_s=round(took_s, 3))
        self._broken_at, self._reason = 0.0, ""

    def _finish(self) -> None:
        """Wait for the other ranks: one may still die, and its replacement then needs the state of this rank."""
        self._meeting(_round_store(), "end", "end their elastic loops").wait_for_all()

    def _meeting(self, store: Store, name: str, purpose: str) -> RoundMeeting:
        actor = self._worker.actor_info
        return RoundMeeting(
            store,
            f"unified/elastic/{name}",
            RoundMember(self._worker.round, actor.rank, actor.world_size),
            MEET_WITHIN_S,
            purpose,
            "The loops of all ranks have to begin in each round, and to end after the same step; `unified stack "
            f"{self._worker.job_info.name}` shows where each rank is.",
        )


class _Boundary:
    """The step after which all ranks of a round leave it, before a planned change of its members.

    Each rank counts itself in at its first commit after the notice. The last rank to do so fixes its next step. No rank
    commits that step before this rank has taken part in it, so all ranks see it in time. If ranks do not meet in each
    step, each leaves at its first commit from there on.
    """

    def __init__(self, store: Store, world_size: int) -> None:
        self._store = store
        self._world_size = world_size
        self._is_counted = False

    def is_reached(self, step: int) -> bool:
        """Return True if this rank leaves after `step`, which it has just committed."""
        if not self._is_counted:
            self._is_counted = True
            if self._store.add("unified/elastic/num-told", 1) == self._world_size:
                self._store.set("unified/elastic/last-step", str(step + 1))
        return self._store.check(["unified/elastic/last-step"]) and step >= int(
            self._store.get("unified/elastic/last-step")
        )


def _round_store() -> Store:
    return connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), MEET_WITHIN_S)


def _decide(said: list[bytes]) -> bytes | None:
    return msgspec.msgpack.encode(agree([msgspec.msgpack.decode(one, type=Holding) for one in said])) if said else None
