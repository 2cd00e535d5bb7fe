"""Planned changes of a role's members, as the code of a worker hears of them."""

import threading

import pytest

from tests.support.master import elastic
from tests.support.runtime import launch_of
from unified.job.spec import JobSpec
from unified.protocol.agent_master import RoundNotice, RunOrder
from unified.protocol.worker_agent import Rejoins, WorkerWord
from unified.worker.rounds import RoundChanges, Rounds

PLANNED = RoundNotice(round=1, kind="planned", reason="a node came", within_s=30)


def in_round() -> tuple[Rounds, RoundChanges, list[WorkerWord]]:
    said: list[WorkerWord] = []
    given = launch_of(JobSpec(name="job", roles=[elastic()]))
    rounds = Rounds(given, given.spec.role(given.role), said.append, lambda order: None)
    rounds._current = RunOrder(round=1, rank=0, world_size=1)
    return rounds, RoundChanges(rounds), said


def test_a_change_is_announced_from_its_notice_on() -> None:
    rounds, changes, said = in_round()
    assert not changes.is_announced
    changes.ready()
    assert said == []
    rounds.on_notice(PLANNED)
    assert changes.is_announced
    changes.ready()
    assert said == [Rejoins(is_able=False, left_round=1)]


def test_a_broken_round_is_no_planned_change() -> None:
    rounds, changes, _ = in_round()
    rounds.on_notice(RoundNotice(round=1, kind="broken", reason="a peer died"))
    assert not changes.is_announced


def test_a_round_that_breaks_while_it_is_joined_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    given = launch_of(JobSpec(name="job", roles=[elastic()]))
    broken = RoundNotice(round=1, kind="broken", reason="a peer died")
    rounds = Rounds(given, given.spec.role(given.role), lambda word: None, lambda order: rounds.on_notice(broken))
    is_aborted = threading.Event()

    def open_round(*args: object) -> int:
        assert is_aborted.wait(10), "it would wait for a peer that never comes"
        raise RuntimeError("aborted")

    monkeypatch.setattr("unified.worker.rounds.open_round", open_round)
    monkeypatch.setattr("unified.worker.rounds.abort_groups", lambda *args: is_aborted.set())
    rounds.begin_loop()
    with pytest.raises(RuntimeError, match="aborted"):
        rounds.join(RunOrder(round=1, rank=0, world_size=2), "cpu")
    rounds._current = None


def test_callbacks_are_called_once_for_each_notice_and_late_ones_at_once() -> None:
    rounds, changes, _ = in_round()
    heard: list[tuple[str, RoundNotice]] = []
    both = threading.Event()

    def fail(notice: RoundNotice) -> None:
        raise ValueError("of the user's own")

    changes.on_change(fail)

    def hear(notice: RoundNotice) -> None:
        heard.append(("early", notice))
        both.set()

    changes.on_change(hear)
    rounds.on_notice(PLANNED)
    assert both.wait(10)
    changes.on_change(lambda notice: heard.append(("late", notice)))
    assert heard == [("early", PLANNED), ("late", PLANNED)]
