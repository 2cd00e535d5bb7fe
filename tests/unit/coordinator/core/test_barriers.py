"""Barriers, one story each: what the state machine does not say in words, and waits that end."""

from typing import Any

import pytest

from tests.support.coordinator import Story, four, killed, wait, worker
from unified.coordinator.core.messages import RequestCame, SpaceClosed
from unified.coordinator.core.records import MAX_BARRIERS
from unified.protocol.coordinator import BarrierResponse, DeregisterWorker

NAMES = ["w0", "w1", "w2", "w3"]


@pytest.fixture
def story() -> Story:
    return four()


def test_last_to_arrive_releases_all_with_one_answer_and_one_write(story: Story) -> None:
    writes = story.num_writes
    tokens = [story.send(wait(name)) for name in ("w2", "w0", "w3")]
    assert story.answers.keys().isdisjoint(tokens)
    tokens.append(story.send(wait("w1")))
    answers = [story.told(token) for token in tokens]
    assert answers[0] == BarrierResponse(released_by="arrived", generation=0, arrived=NAMES)
    assert all(answer is answers[0] for answer in answers)
    assert story.num_writes == writes + 1


def test_it_is_used_again_by_its_id(story: Story) -> None:
    for generation in range(3):
        tokens = [story.send(wait(name, generation + 1)) for name in NAMES]
        assert {story.told(token).generation for token in tokens} == {generation}


def test_worker_that_arrives_twice_counts_once_and_is_answered_twice(story: Story) -> None:
    tokens = [story.send(wait(name, arrival)) for name in ("w0", "w1", "w2") for arrival in (1, 2)]
    assert story.answers.keys().isdisjoint(tokens)
    last = story.send(wait("w3"))
    assert {story.told(token).generation for token in [*tokens, last]} == {0}
    assert story.ask(wait("w0", 1), BarrierResponse) == story.told(last)
    assert story.ask(wait("w0", 2), BarrierResponse) == story.told(last)
    assert story.release(story.send(wait("w0", 3))) is None


def test_answer_that_was_lost_is_given_again_even_by_a_restarted_coordinator(story: Story) -> None:
    tokens = [story.send(wait(name, 7)) for name in NAMES]
    first = story.told(tokens[0])
    story.send(wait("w1", 8))
    story.restart()
    assert story.ask(wait("w0", 7), BarrierResponse) == first
    assert story.release(story.send(wait("w0", 8))) is None
    later = [story.send(wait(name, 8)) for name in ("w1", "w2", "w3")]
    assert story.told(later[0]).generation == 1


def test_loss_releases_the_others_and_names_who_is_lost_and_who_is_missing(story: Story) -> None:
    tokens = [story.send(wait(name)) for name in ("w0", "w1")]
    story.tell(killed("w3"))
    answer = story.told(tokens[0])
    assert (answer.released_by, answer.arrived, answer.missing, answer.lost) == ("lost", ["w0", "w1"], ["w2"], ["w3"])
    assert answer.reason == "barrier 'b' of 4 cannot be reached without w3 (gone, as it was killed by signal 9)."
    assert [each.event for each in story.reports[-2:]] == ["worker-lost", "barrier-broken"]


def test_who_arrives_after_a_loss_does_not_wait_for_the_lost_one(story: Story) -> None:
    story.tell(killed("w3"))
    assert story.told(story.send(wait("w0"))).lost == ["w3"]
    story.send(worker("w3", incarnation=1))
    tokens = [story.send(wait(name, 2)) for name in NAMES[:3]]
    tokens.append(story.send(wait("w3", incarnation=1)))
    assert story.told(tokens[0]).released_by == "arrived"


def test_silence_at_a_barrier_is_a_loss_and_waiting_alone_keeps_nobody_alive() -> None:
    story = four(timeout_s=10)
    token = story.send(wait("w0"))
    story.after(9)
    story.beat("w0", "w1", "w2")
    story.after(1)
    assert story.told(token).lost == ["w3"]
    assert "nothing was heard from it for 10.0 s" in story.told(token).reason


def test_barrier_shrinks_by_choice(story: Story) -> None:
    tokens = [story.send(wait(name, on_loss="shrink")) for name in ("w0", "w1", "w2")]
    story.tell(killed("w3"))
    answer = story.told(tokens[0])
    assert (answer.released_by, answer.arrived, answer.lost) == ("arrived", ["w0", "w1", "w2"], ["w3"])
    assert "without w3" in answer.reason
    again = [story.send(wait(name, 2, on_loss="shrink")) for name in ("w0", "w1")]
    assert story.answers.keys().isdisjoint(again)
    story.send(worker("w3", incarnation=1))
    again.append(story.send(wait("w2", 2, on_loss="shrink")))
    assert story.answers.keys().isdisjoint(again)
    again.append(story.send(wait("w3", 1, incarnation=1, on_loss="shrink")))
    assert story.told(again[0]) == BarrierResponse(released_by="arrived", generation=1, arrived=NAMES)


def test_rank_that_somebody_else_has_taken_is_not_lost(story: Story) -> None:
    story.tell(killed("w3"))
    story.send(worker("spare", rank=3))
    tokens = [story.send(wait(name)) for name in ("w0", "w1", "w2")]
    assert story.answers.keys().isdisjoint(tokens)
    answer = story.told(story.send(wait("spare")))
    assert (answer.released_by, answer.arrived) == ("arrived", ["w0", "w1", "w2", "spare"])


def test_workers_without_ranks_are_not_missed_while_there_are_enough() -> None:
    story = Story()
    for name in "abcde":
        story.send(worker(name, rank=-1))
    story.tell(killed("e"))
    token = story.send(wait("a"))
    assert story.release(token) is None
    story.tell(killed("d"))
    assert story.told(token).lost == ["d", "e"]


def test_losses_of_an_earlier_run_do_not_count_in_the_next(story: Story) -> None:
    for name in NAMES:
        story.tell(killed(name))
    tokens = []
    for name in NAMES:
        story.send(worker(name, incarnation=1))
        tokens.append(story.send(wait(name, incarnation=1)))
    assert story.told(tokens[0]).released_by == "arrived"


def test_loss_that_only_the_lost_have_seen_counts_no_more(story: Story) -> None:
    story.tell(killed("w2"))
    story.send(worker("w1", incarnation=1))
    token = story.send(wait("w1", incarnation=1, on_loss="shrink"))
    story.send(wait("w0", on_loss="shrink"))
    story.tell(killed("w0"))
    for name in ("w0", "w3"):
        story.send(worker(name, incarnation=1))
        story.send(wait(name, incarnation=1, on_loss="shrink"))
    assert story.release(token) is None
    story.send(worker("w2", incarnation=1))
    story.send(wait("w2", incarnation=1, on_loss="shrink"))
    assert story.told(token) == BarrierResponse(released_by="arrived", generation=0, arrived=NAMES)


def test_losses_of_another_world_do_not_count(story: Story) -> None:
    story.send(worker("x0", rank=0, world_size=2))
    token = story.send(wait("w0"))
    story.tell(killed("x0"))
    assert story.release(token) is None


@pytest.mark.parametrize(
    ("in_order", "mine", "reason"), [(False, ("lost", ["w3"]), "killed by"), (True, ("closed", []), "it deregistered")]
)
def test_who_is_lost_or_leaves_while_it_waits_is_told_so_and_releases_the_others(
    story: Story, in_order: bool, mine: tuple[str, list[str]], reason: str
) -> None:
    waiting, others = story.send(wait("w3")), story.send(wait("w0"))
    if in_order:
        story.send(DeregisterWorker(worker_id="w3", session="w3/0"))
    else:
        story.tell(killed("w3"))
    assert (story.told(waiting).released_by, story.told(waiting).lost) == mine
    answer = story.told(others)
    assert (answer.released_by, answer.arrived, answer.lost) == ("lost", ["w0"], ["w3"])
    assert reason in answer.reason


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"barrier_id": ""}, "without an id"),
        ({"world_size": 0}, "world_size=4"),
        ({"world_size": 3}, "barrier 'b' of 3, and is registered with world_size=4"),
        ({"timeout_s": -1.0}, "-1.0 s"),
        ({"timeout_s": float("nan")}, "nan s"),
        ({"on_loss": "shrink"}, "where w0 has 'fail'"),
    ],
)
def test_bad_arrival_is_refused_and_the_others_wait_on(fields: dict[str, Any], words: str, story: Story) -> None:
    tokens = [story.send(wait("w0"))]
    story.refuses(wait("w1", **fields), "bad-request", words)
    tokens += [story.send(wait(name)) for name in ("w1", "w2", "w3")]
    assert story.told(tokens[0]).released_by == "arrived"


def test_worlds_of_different_sizes_do_not_meet(story: Story) -> None:
    story.send(worker("x0", rank=0, world_size=2))
    story.send(wait("w0"))
    refusal = story.refused(wait("x0", world_size=2))
    assert "x0 waits at barrier 'b' of 2, where w0 waits for 4" in refusal.reason


def test_worker_has_to_be_registered_and_its_newest_incarnation() -> None:
    story = Story()
    assert story.refused(wait("w0")).code == "unknown-worker"
    assert story.core.spaces == {}
    story.send(worker("w0"))
    story.send(worker("w0", incarnation=1))
    assert story.refused(wait("w0")).code == "replaced"
    story.send(worker("w9", rank=-1, world_size=0))
    assert "world_size=0" in story.refused(wait("w9")).reason


def test_rank_and_world_of_a_worker_that_waits_can_not_change(story: Story) -> None:
    token = story.send(wait("w0"))
    story.refuses(worker("w0", rank=0, world_size=8), "bad-request", "waits at barrier b")
    story.send(worker("w0", hostname="elsewhere"))
    story.tell(killed("w3"))
    assert story.told(token).lost == ["w3"]


def test_spaces_have_barriers_of_their_own_and_release_them_when_they_close(story: Story) -> None:
    for name in NAMES:
        story.send(worker(name, space="job"))
    outside = story.send(wait("w0", timeout_s=50))
    inside = [story.send(wait(name, space="job", timeout_s=50)) for name in ("w1", "w2", "w3")]
    assert story.answers.keys().isdisjoint([outside, *inside])
    story.tell(SpaceClosed(space="job"))
    assert {story.told(token).released_by for token in inside} == {"closed"}
    assert story.release(outside) is None
    story.core.timers.barriers.due(story.now + 1000)
    assert story.core.timers.barriers.next_deadline is None


def test_barriers_that_are_used_no_more_are_forgotten_the_oldest_first() -> None:
    story = Story()
    story.send(worker("w0", world_size=1))
    story.send(worker("w1", rank=1, world_size=2))
    waiting = story.send(wait("w1", barrier_id="open", world_size=2))
    for i in range(MAX_BARRIERS - 1):
        request = wait("w0", i, barrier_id=f"epoch_{i}", world_size=1)
        story.core.step(story.now, RequestCame(token=(b"", i), request=request))
    story.store["coordinator-barrier", "0//epoch_0"] = b""
    story.send(wait("w0", MAX_BARRIERS, barrier_id="one-more", world_size=1))
    barriers = story.core.spaces[""].barriers
    assert len(barriers) == MAX_BARRIERS
    assert "open" in barriers
    assert "epoch_0" not in barriers
    assert ("coordinator-barrier", "0//epoch_0") not in story.store
    assert story.release(waiting) is None


def test_time_out_of_one_releases_all_and_names_who_is_missing(story: Story) -> None:
    patient = story.send(wait("w0"))
    hasty = story.send(wait("w1", timeout_s=5))
    story.send(wait("w2", timeout_s=9))
    story.after(4.9)
    assert story.release(patient) is None
    story.after(0.1)
    answer = story.told(hasty)
    assert answer is story.told(patient)
    assert (answer.released_by, answer.arrived, answer.missing) == ("timeout", ["w0", "w1", "w2"], ["w3"])
    assert answer.reason == "barrier 'b' of 4 timed out: missing w3; arrived: w0, w1, w2."
    late = story.send(wait("w3", timeout_s=5))
    assert story.release(late) is None
    story.after(5)
    assert (story.told(late).generation, story.told(late).missing) == (1, ["w0", "w1", "w2"])


def test_asking_again_does_not_give_an_arrival_more_time(story: Story) -> None:
    first = story.send(wait("w0", timeout_s=5))
    story.after(3)
    again = story.send(wait("w0", timeout_s=5))
    story.after(2)
    assert story.told(again).released_by == "timeout"
    assert story.release(first) is None


def test_time_out_of_nothing_only_looks(story: Story) -> None:
    assert story.told(story.send(wait("w0", timeout_s=0))).missing == ["w1", "w2", "w3"]


@pytest.mark.parametrize(
    ("registered", "missing", "words"),
    [
        (["w0", "w2"], ["w2"], "rank 1 (nobody registered for it), rank 3 (nobody registered for it)"),
        (["a"], [], "missing 3 workers that never registered"),
    ],
)
def test_time_out_names_or_counts_those_who_did_not_register(
    registered: list[str], missing: list[str], words: str
) -> None:
    story = Story()
    for name in registered:
        story.send(worker(name))
    token = story.send(wait(registered[0], timeout_s=5))
    story.after(5)
    assert story.told(token).missing == missing
    assert words in story.told(token).reason


def test_time_out_in_a_world_of_any_size_goes_through_no_list_of_it() -> None:
    story = Story()
    story.send(worker("w0", world_size=1 << 40))
    token = story.send(wait("w0", timeout_s=5, world_size=1 << 40))
    story.after(5)
    assert f"missing {(1 << 40) - 1} workers that never registered" in story.told(token).reason


def test_time_out_of_a_shrunk_barrier_names_the_lost_too(story: Story) -> None:
    story.tell(killed("w3"))
    token = story.send(wait("w0", timeout_s=5, on_loss="shrink"))
    story.after(5)
    assert (story.told(token).missing, story.told(token).lost) == (["w1", "w2"], ["w3"])
    assert "missing w1, w2, w3 (gone, as it was killed by signal 9); arrived: w0" in story.told(token).reason
