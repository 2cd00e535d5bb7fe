"""Cycles of calls through concurrency limits: always broken, only when there is one; a plain one only once."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified.bus.calls.deadlock.graph import (
    KEEP_S,
    BlockedCall,
    WaitsForGraph,
    decode_blocked,
    encode_blocked,
    name_of,
    reader_of,
    stuck,
)
from unified.errors import ProtocolError

WORKERS = ("w0", "w1", "w2")
LIMITS = {0: 1, 1: 2}
LOOK_S = 0.25


class Plan(NamedTuple):
    """What a call does: its handler makes all these calls, and waits for all."""

    worker: str
    group: int | None
    calls: list[Plan]


class Call:
    def __init__(self, name: str, plan: Plan, parent: Call | None) -> None:
        self.name, self.plan, self.parent = name, plan, parent
        self.awaited: list[Call] = []
        self.has_ended = False


class Job:
    """Workers, their limits and all calls; each look of a worker, and each message, comes when it is told to."""

    def __init__(self, plans: list[Plan]) -> None:
        self.now = 0.0
        self.running: list[Call] = []
        self.lines: dict[tuple[str, int], list[Call]] = {}
        self.inside: Counter[tuple[str, int]] = Counter()
        self.graphs = {worker: WaitsForGraph(worker) for worker in WORKERS}
        self.mail: list[tuple[str, str, list[BlockedCall]]] = []
        self.refused: list[str] = []
        self._num_calls = 0
        roots = [self.make(plan, None) for plan in plans]
        for root in roots:  # together: all are in, or in line, before the first makes a call
            self.ask(root)
        self.settle()

    def make(self, plan: Plan, parent: Call | None) -> Call:
        self._num_calls += 1
        caller = "root" if parent is None else parent.plan.worker
        call = Call(name_of(caller, self._num_calls), plan, parent)
        group = (plan.worker, plan.group)
        if plan.group is None:
            self.running.append(call)
        elif self.inside[group] < LIMITS[plan.group]:  # type: ignore[index]
            self.inside[group] += 1  # type: ignore[index]
            self.running.append(call)
        else:
            self.lines.setdefault((plan.worker, plan.group), []).append(call)
        return call

    def ask(self, call: Call) -> None:
        if call in self.running and not call.awaited:
            call.awaited = [self.make(plan, call) for plan in call.plan.calls]
            for each in call.awaited:
                self.ask(each)

    def settle(self) -> None:
        """Let everything go as far as it can."""
        while ended := [call for call in self.running if all(each.has_ended for each in call.awaited)]:
            for call in ended:
                self.running.remove(call)
                call.has_ended = True
                if call.plan.group is None:
                    continue
                group = (call.plan.worker, call.plan.group)
                line = self.lines.get(group)
                if line:
                    self.running.append(line.pop(0))
                    self.ask(self.running[-1])
                else:
                    self.inside[group] -= 1

    def blocked(self, worker: str | None = None) -> list[BlockedCall]:
        """All that does not go on, of one worker or of all."""
        found = []
        for (where, group), line in self.lines.items():
            let_in = [call.name for call in self.running if (call.plan.worker, call.plan.group) == (where, group)]
            found += [BlockedCall(call.name, where, "", True, let_in) for call in line if worker in (None, where)]
        for call in self.running:
            names = [each.name for each in call.awaited if not each.has_ended]
            if worker in (None, call.plan.worker):
                found.append(BlockedCall(call.name, call.plan.worker, "", False, names))
        return found

    def look(self, worker: str) -> None:
        by_name = {call.name: call for call in [*self.running, *itertools.chain(*self.lines.values())]}
        came = {name: call.parent is not None for name, call in by_name.items()}
        findings = self.graphs[worker].look(self.now, self.blocked(worker), came)
        for name, blocked in findings.tell.items():
            caller = by_name[name].parent
            assert caller is not None
            self.mail.append((caller.plan.worker, name, decode_blocked(encode_blocked(blocked))))
        for name in findings.refuse:
            dead = stuck({each.call: each for each in self.blocked()})
            assert name in dead, "a call that would have gone on was refused"
            call = by_name[name]
            self.lines[call.plan.worker, call.plan.group].remove(call)  # type: ignore[index]
            call.has_ended = True
            self.refused.append(name)
            self.settle()

    def go_on(self, chance: random.Random, num_looks: int) -> None:
        """Everybody looks, again and again, and what is told arrives in any order, until all has ended."""
        while self.running and self.now < num_looks * LOOK_S:
            self.now += LOOK_S
            for looking in chance.sample(WORKERS, len(WORKERS)):
                self.look(looking)
                while self.mail and chance.random() < 0.8:
                    worker, name, blocked = self.mail.pop(chance.randrange(len(self.mail)))
                    self.graphs[worker].hear(self.now, name, blocked)
        assert not self.running


def plans(depth: int) -> st.SearchStrategy[Plan]:
    inner = st.just([]) if depth == 0 else st.lists(plans(depth - 1), max_size=2)
    return st.builds(Plan, st.sampled_from(WORKERS), st.sampled_from([None, 0, 0, 1]), inner)


@given(st.lists(plans(3), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_every_call_ends_and_none_is_refused_that_would_have_gone_on(
    planned: list[Plan], chance: random.Random
) -> None:
    job = Job(planned)
    would_hang = bool(job.running)
    job.go_on(chance, 200)
    assert bool(job.refused) == would_hang


@given(st.integers(1, 3), st.randoms(use_true_random=False))
def test_one_call_of_a_plain_cycle_is_refused(size: int, chance: random.Random) -> None:
    job = Job([Plan(WORKERS[i], 0, [Plan(WORKERS[(i + 1) % size], 0, [])]) for i in range(size)])
    job.go_on(chance, 100)
    assert len(job.refused) == 1


def test_what_was_heard_long_ago_does_not_count() -> None:
    graph = WaitsForGraph("w0")
    here = [BlockedCall("x.1", "w0", "f", True, ["x.2"]), BlockedCall("x.2", "w0", "g", False, ["w0.3"])]
    heard = [BlockedCall("w0.3", "w1", "h", True, ["x.4"]), BlockedCall("x.4", "w1", "i", False, ["x.1"])]
    graph.hear(0.0, "w0.3", heard)
    assert not graph.look(KEEP_S, here, {"x.1": True}).refuse
    graph.hear(KEEP_S, "w0.3", heard)
    (cycle,) = graph.look(KEEP_S, here, {"x.1": True}).refuse.values() or [""]
    assert cycle == ""  # w0.3 is to be refused: its name comes first
    graph.hear(KEEP_S, "w0.3", [BlockedCall("y.3", "w1", "h", False, ["x.1"])])
    later = [here[0], BlockedCall("x.2", "w0", "g", False, ["y.3"])]
    assert graph.look(KEEP_S, later, {"x.1": True}).refuse == {"x.1": "f (in line) -> g (waits) -> h (waits)"}


def test_call_behind_a_stream_is_ended_by_its_caller_when_that_reads_the_stream() -> None:
    graph = WaitsForGraph("w0")
    reading = BlockedCall("x.9", "w0", "k", False, ["w0.2"])
    graph.hear(
        0.0, "w0.2", [BlockedCall("w0.2", "w1", "c", True, ["w0.1"]), BlockedCall("w0.1", "w1", "g", False, ["w0.1>"])]
    )
    reader = BlockedCall(reader_of("w0.1"), "w0", "the reader", False, ["x.9"])
    assert not graph.look(0.0, [reading], {}, {"w0.1", "w0.2"}).refuse  # others may read it
    assert set(graph.look(0.0, [reading, reader], {}, {"w0.1", "w0.2"}).refuse) == {"w0.2"}
    assert not graph.look(0.0, [reading, reader], {}, set()).refuse  # it has ended meanwhile


def test_caller_is_told_again_only_when_there_is_news_or_time_has_passed() -> None:
    graph = WaitsForGraph("w0")
    here = [BlockedCall("x.1", "w0", "f", True, ["x.2"])]
    told = [bool(graph.look(i * LOOK_S, here, {"x.1": True}).tell) for i in range(20)]
    assert told.index(True) == 1  # not at first sight
    assert [i for i, is_told in enumerate(told) if is_told] == [1, 9, 17]
    graph.look(5.0, [BlockedCall("x.1", "w0", "f", True, ["x.5"])], {"x.1": True})
    assert graph.look(5.25, here, {"x.1": True}).tell


def test_rubbish_is_no_message() -> None:
    for body in (b"", b"\xc1", b"\x81\xa1a\x01", b"\x91\x91\xa1a"):
        with pytest.raises(ProtocolError, match="not the body of a WAITS"):
            decode_blocked(body)
