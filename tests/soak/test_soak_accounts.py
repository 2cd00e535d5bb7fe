"""That the soak's accounts find what is wrong, and bear what is right: a check that cannot fail checks nothing."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.soak.accounts import Accounts, Kill, close
from tests.soak.health import Sample, growth, judge
from tests.soak.journal import Fact, Incarnation, Journal, Tail, read

A, B, C = Incarnation("peer-0", 0), Incarnation("peer-1", 0), Incarnation("peer-2", 0)
PUT = [(1.0, A, "put?"), (1.1, A, "put!")]
DONE_BY_B = [(2.0, B, "take"), (2.1, B, "keep"), (2.2, B, "ack?"), (2.3, B, "ack!")]
DONE_BY_C = [(5.0, C, "take"), (5.1, C, "keep"), (5.2, C, "ack?"), (5.3, C, "ack!")]
KILL_B = [Kill(3.0, B)]
Step = tuple[float, Incarnation, str]


def story(steps: Sequence[Step], kills: Sequence[Kill] = ()) -> Accounts:
    """The accounts of one item."""
    return close(
        [Fact(incarnation, at, word, ["q", ["item"], *([""] * (word == "doubt"))]) for at, incarnation, word in steps],
        kills,
    )


@pytest.mark.parametrize(
    ("steps", "kills"),
    [
        (PUT + DONE_BY_B, []),
        (PUT + DONE_BY_B, KILL_B),
        ([(1.0, A, "put?"), *DONE_BY_B], [Kill(1.05, A)]),
        ([(1.0, A, "put?")], [Kill(1.05, A)]),
        (PUT + DONE_BY_B[:1] + DONE_BY_C, KILL_B),
        (PUT + DONE_BY_B[:2] + DONE_BY_C, KILL_B),
        (PUT + DONE_BY_B[:3] + DONE_BY_C, KILL_B),
        (PUT + DONE_BY_B[:3], KILL_B),
    ],
    ids=[
        "plain",
        "killed long after",
        "its producer did not live to know",
        "a put that was cut off and is not in",
        "killed before keeping",
        "killed before acknowledging",
        "killed while acknowledging, and given again",
        "killed while acknowledging, and not given again",
    ],
)
def test_what_may_be(steps: Sequence[Step], kills: Sequence[Kill]) -> None:
    accounts = story(steps, kills)
    assert accounts.wrong == []


@pytest.mark.parametrize(
    ("steps", "kills", "text"),
    [
        (PUT, [], "lost: it was put and never delivered"),
        (DONE_BY_B, [], "out of nowhere"),
        (PUT + DONE_BY_B + DONE_BY_C, [], "peer-1#0 had acknowledged it, and peer-2#0 was given it"),
        (PUT + DONE_BY_B + DONE_BY_C, KILL_B, "had acknowledged it"),
        (PUT + DONE_BY_B[:2] + DONE_BY_C, [], "peer-1#0 has it and lives"),
        (PUT + DONE_BY_B[:2] + DONE_BY_C, [Kill(6.0, B)], "1.000 s before peer-1#0 died"),
        (PUT + DONE_BY_B[:1], KILL_B, "peer-1#0 died with it"),
        (PUT + DONE_BY_B[:2], KILL_B, "peer-1#0 died with it"),
        (PUT + DONE_BY_B[:2], [], "left over"),
        (PUT + DONE_BY_B[:3], [], "left over"),
        ([(1.0, A, "put?"), (1.1, A, "doubt"), *DONE_BY_B], [], "queue q: "),
    ],
)
def test_what_may_not(steps: Sequence[Step], kills: Sequence[Kill], text: str) -> None:
    found = story(steps, kills).wrong
    assert len(found) == 1
    assert text in found[0]


def test_a_get_that_gave_nothing_acknowledges_if_the_owner_was_there() -> None:
    steps = [*PUT, *DONE_BY_B[:3], (2.3, B, "ack~"), *DONE_BY_C]
    facts = [Fact(incarnation, at, word, ["durable", ["item"]]) for at, incarnation, word in steps]
    assert close(facts, [*KILL_B, Kill(2.1, Incarnation("vault-0", 0))]).wrong == []
    (found,) = close(facts, [*KILL_B, Kill(2.5, Incarnation("vault-0", 0))]).wrong
    assert "peer-1#0 had acknowledged it" in found


def test_a_death_that_nobody_caused() -> None:
    facts = [Fact(A, 10.0, "died", ["peer_8-1_1-0", 9.0, "E: why"])]
    assert close(facts, [Kill(9.5, B)]).wrong == []
    (found,) = close(facts, [Kill(3.0, B)]).wrong
    assert found.startswith("10.0 s, peer-0#0: a call to peer_8-1_1-0 ended in its death, but it was killed 7.0 s ago")
    assert found.endswith("E: why")
    assert len(close(facts, [Kill(9.5, C)]).wrong) == 1
    assert close([Fact(A, 10.0, "died", ["*", 9.0, "E: why"])], [Kill(9.5, C)]).wrong == []


def test_journals_are_read_as_they_grow_and_without_a_line_that_was_cut(tmp_path: Path) -> None:
    journal, tail = Journal(tmp_path, Incarnation("peer-3", 2)), Tail(tmp_path)
    journal.write("calls", {"echo/result": 3, "fail/expected-error": 1}, 0.5)
    journal.write("put!", "q", ["a", "b"])
    assert tail.read() == {"calls": 4, "put!": 2}
    with (tmp_path / "peer-3.2.journal").open("ab") as file:
        file.write(b'["wrong", 1.0, "cu')
    assert tail.read() == {"calls": 4, "put!": 2}
    with (tmp_path / "peer-3.2.journal").open("ab") as file:
        file.write(b't"]\n["cut')
    assert tail.read() == {"calls": 4, "put!": 2, "wrong": 1}
    facts = list(read(tmp_path))
    assert [(fact.incarnation, fact.word) for fact in facts] == [
        (Incarnation("peer-3", 2), word) for word in ("calls", "put!", "wrong")
    ]
    accounts = close(facts, [])
    assert (accounts.num_calls, accounts.longest_lateness_s, len(accounts.wrong)) == (4, 0.5, 3)  # two items were lost


TIMES = [2.0 * place for place in range(240)]


def noisy(slope: float, seed: int = 1) -> list[float]:
    """Memory that jumps up with every payload and falls back, on top of a trend in units a second."""
    rng = random.Random(seed)
    return [200 + slope * at + rng.choice([0, 0, rng.expovariate(1 / 60)]) + rng.random() for at in TIMES]


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_is_told_from_noise(seed: int) -> None:
    steady, leaking = growth(TIMES, noisy(0, seed)), growth(TIMES, noisy(0.1, seed))
    assert steady is not None
    assert leaking is not None
    assert steady.at_least < 2
    assert leaking.at_least == pytest.approx(0.1 * TIMES[-1], rel=0.2)


def test_only_what_lived_all_the_time_is_judged_and_each_by_its_name() -> None:
    leak, flat = noisy(0.1), noisy(0)
    samples = [
        Sample(
            at,
            {"elder": leak[place], "agent": flat[place]} | ({"late": at} if place > 50 else {}),
            {"agent": place // 4},
            0,
            0,
            9,
        )
        for place, at in enumerate(TIMES)
    ]
    growths, wrong = judge(samples, 0)
    assert set(growths) == {"memory of elder", "memory of agent", "descriptors of agent"}
    assert [line.partition(" grows")[0] for line in wrong] == ["memory of elder", "descriptors of agent"]
    assert growth(TIMES[:8], flat[:8]) is None, "too few to judge"


def test_memory_that_grows_in_steps_is_no_noise_in_a_long_run() -> None:
    """As that of a cache does, which may be more than is sure: but flat it is not."""
    times = [120 + 2.0 * place for place in range(240)]
    steps = [405.0 if at < 160 else 474.0 if at < 330 else 510.0 for at in times]
    samples = [Sample(at, {"elder": mib}, {}, 0, 0, 9) for at, mib in zip(times, steps, strict=True)]
    assert judge(samples, 120)[1] == ["memory of elder grows: by 57.4 mib, by 0.0 at the least"]
    assert judge([sample._replace(anonymous_mib={"elder": 405.0}) for sample in samples], 120)[1] == []
