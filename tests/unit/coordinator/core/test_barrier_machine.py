"""Barriers as a state machine, beside a model that recomputes from scratch what should happen."""

from math import inf
from typing import Any, Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.coordinator import Story, wait, worker
from unified.coordinator.core.messages import SpaceClosed, Token, WorkerGone
from unified.protocol.client_master import Done
from unified.protocol.coordinator import BarrierResponse, DeregisterWorker, LeaveBarrier

WORLD = 3
NAMES = [f"w{rank}" for rank in range(WORLD)]
BARRIERS: dict[str, Literal["fail", "shrink"]] = {"strict": "fail", "loose": "shrink"}
name_of = st.sampled_from(NAMES)
barrier_of = st.sampled_from(list(BARRIERS))


class Model:
    """One barrier: who waits, with which arrivals, and until when."""

    def __init__(self) -> None:
        self.waiting: dict[str, dict[int, tuple[Token, float | None, float]]] = {}
        """By worker and arrival: where it is answered, how long it waits, and until when."""
        self.generation = 0
        self.answered: dict[str, tuple[int, int, BarrierResponse]] = {}
        """By worker: its incarnation, its last arrival, and what all were told."""

    @property
    def deadline(self) -> float:
        return min((until for tokens in self.waiting.values() for *_, until in tokens.values()), default=inf)


class BarrierMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.story = Story()
        self.models = {barrier_id: Model() for barrier_id in BARRIERS}
        self.tick = 0
        self.incarnations: dict[str, int] = {}
        self.came: dict[str, int] = {}
        self.gone: dict[str, int] = {}
        self.arrivals = 0

    @rule(name=name_of)
    def register(self, name: str) -> None:
        """A first incarnation, or a new one, which ends the one that is there."""
        incarnation = self.incarnations.get(name, -1) + 1
        if name in self.came:
            self._note_end(name)
        self.story.send(self._info(name, incarnation))
        if name in self.gone:
            self._expect(after_loss_of=name)
        self.tick += 1
        self.incarnations[name] = incarnation
        self.came[name] = self.tick
        self.gone.pop(name, None)
        self._expect()

    @precondition(lambda self: self.came)
    @rule(data=st.data(), barrier_id=barrier_of, timeout_s=st.sampled_from([None, None, 0.0, 5.0, 20.0]))
    def arrive(self, data: st.DataObject, barrier_id: str, timeout_s: float | None) -> None:
        """Whether it waits there already or not."""
        self.arrivals += 1
        self._send(data.draw(st.sampled_from(sorted(self.came))), barrier_id, self.arrivals, timeout_s)

    @precondition(lambda self: any(model.waiting for model in self.models.values()))
    @rule(data=st.data())
    def ask_again_while_waiting(self, data: st.DataObject) -> None:
        name, barrier_id, arrival = data.draw(st.sampled_from(self._arrivals()))
        tokens = self.models[barrier_id].waiting[name]
        old, timeout_s, until = tokens[arrival]
        token = self.story.send(self._wait(name, barrier_id, arrival, timeout_s))
        assert token not in self.story.answers
        assert old not in self.story.answers
        tokens[arrival] = (token, timeout_s, until)

    @precondition(lambda self: any(model.waiting for model in self.models.values()))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """One arrival waits no more: it alone is answered, and the others wait as if it had never come."""
        name, barrier_id, arrival = data.draw(st.sampled_from(self._arrivals()))
        tokens = self.models[barrier_id].waiting[name]
        token, *_ = tokens.pop(arrival)
        if not tokens:
            del self.models[barrier_id].waiting[name]
        self._leave(name, barrier_id, arrival)
        assert self.story.told(token).released_by == "closed"

    @rule(name=name_of, barrier_id=barrier_of, arrival=st.integers(0, 20))
    def leave_where_it_does_not_wait(self, name: str, barrier_id: str, arrival: int) -> None:
        if arrival not in self.models[barrier_id].waiting.get(name, {}):
            self._leave(name, barrier_id, arrival)

    @rule(name=name_of, barrier_id=barrier_of)
    def ask_again_when_answered(self, name: str, barrier_id: str) -> None:
        """Its answer was lost: it is told the same."""
        incarnation, arrival, response = self.models[barrier_id].answered.get(name, (-1, 0, None))
        if name in self.came and incarnation == self.incarnations[name] and name not in self.models[barrier_id].waiting:
            assert self.story.ask(self._wait(name, barrier_id, arrival, None), BarrierResponse) == response

    @precondition(lambda self: self.came)
    @rule(data=st.data(), is_orderly=st.booleans())
    def go(self, data: st.DataObject, is_orderly: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.came)))
        incarnation = self.incarnations[name]
        self._note_end(name)
        if is_orderly:
            self.story.send(DeregisterWorker(worker_id=name, session=f"{name}/{incarnation}"))
        else:
            self.story.tell(WorkerGone(space="", worker_id=name, reason="it was killed"))
        self._expect(after_loss_of=name, own="closed" if is_orderly else "lost")

    @rule(seconds=st.sampled_from([1.0, 5.0, 15.0]))
    def pass_time(self, seconds: float) -> None:
        self.story.after(seconds)
        for barrier_id in sorted(self.models):
            model = self.models[barrier_id]
            if model.deadline <= self.story.now:
                self._expect_release(barrier_id, "timeout")

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """Those who wait ask again, in any order."""
        self.story.restart()
        for barrier_id, model in self.models.items():
            waiting, model.waiting = model.waiting, {}
            for name in data.draw(st.permutations(sorted(waiting))):
                for arrival, (_, timeout_s, _) in waiting[name].items():
                    self._send(name, barrier_id, arrival, timeout_s or None)

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        """All is answered that has to be, and nothing else: `_expect` saw to the first."""
        for model in self.models.values():
            for tokens in model.waiting.values():
                for token, *_ in tokens.values():
                    assert token not in self.story.answers

    def teardown(self) -> None:
        self.story.tell(SpaceClosed(space=""))
        for model in self.models.values():
            for tokens in model.waiting.values():
                for token, *_ in tokens.values():
                    assert self.story.told(token).released_by == "closed"
        assert self.story.store == {}
        assert self.story.core.next_deadline is None

    @staticmethod
    def _info(name: str, incarnation: int) -> Any:
        return worker(name, incarnation, world_size=WORLD, timeout_s=1e6)

    def _wait(self, name: str, barrier_id: str, arrival: int, timeout_s: float | None) -> Any:
        return wait(
            name,
            arrival,
            barrier_id=barrier_id,
            incarnation=self.incarnations[name],
            world_size=WORLD,
            timeout_s=timeout_s,
            on_loss=BARRIERS[barrier_id],
        )

    def _send(self, name: str, barrier_id: str, arrival: int, timeout_s: float | None) -> None:
        model = self.models[barrier_id]
        token = self.story.send(self._wait(name, barrier_id, arrival, timeout_s))
        until = inf if timeout_s is None else self.story.now + timeout_s
        model.waiting.setdefault(name, {})[arrival] = (token, timeout_s, until)
        self._expect()

    def _arrivals(self) -> list[tuple[str, str, int]]:
        return [
            (name, barrier_id, arrival)
            for barrier_id, model in self.models.items()
            for name, tokens in model.waiting.items()
            for arrival in tokens
        ]

    def _leave(self, name: str, barrier_id: str, arrival: int) -> None:
        session = f"{name}/{self.incarnations.get(name, 0)}"
        self.story.ask(LeaveBarrier(barrier_id=barrier_id, worker_id=name, session=session, arrival=arrival), Done)

    def _note_end(self, name: str) -> None:
        self.tick += 1
        del self.came[name]
        self.gone[name] = self.tick

    def _expect(self, after_loss_of: str | None = None, own: str = "lost") -> None:
        """What the model says has been answered by now."""
        for barrier_id, model in self.models.items():
            tokens = model.waiting.pop(after_loss_of, {}) if after_loss_of is not None else {}
            for token, *_ in tokens.values():
                answer = self.story.told(token)
                assert answer.released_by == own
                assert answer.lost == ([after_loss_of] if own == "lost" else [])
            if not model.waiting:
                continue
            lost = self._lost(model)
            needed = WORLD - (len(lost) if BARRIERS[barrier_id] == "shrink" else 0)
            if len(model.waiting) >= needed:
                self._expect_release(barrier_id, "arrived")
            elif lost and BARRIERS[barrier_id] == "fail":
                self._expect_release(barrier_id, "lost")
            elif model.deadline <= self.story.now:
                self._expect_release(barrier_id, "timeout")

    def _lost(self, model: Model) -> list[str]:
        oldest = min(self.came[name] for name in model.waiting)
        return sorted(name for name, tick in self.gone.items() if tick > oldest)

    def _expect_release(self, barrier_id: str, released_by: str) -> None:
        model = self.models[barrier_id]
        first, *answers = [self.story.told(token) for tokens in model.waiting.values() for token, *_ in tokens.values()]
        assert all(answer is first for answer in answers)
        arrived = sorted(model.waiting)
        assert (first.released_by, first.generation, first.arrived) == (released_by, model.generation, arrived)
        assert first.lost == (self._lost(model) if len(arrived) < WORLD else [])
        assert first.missing == ([] if released_by == "arrived" else sorted(self.came.keys() - set(arrived)))
        assert (first.reason == "") == (len(arrived) == WORLD)
        model.generation += 1
        model.answered.update({name: (self.incarnations[name], max(model.waiting[name]), first) for name in arrived})
        model.waiting = {}


BarrierMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
TestBarrierMachine = BarrierMachine.TestCase
