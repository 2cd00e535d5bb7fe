"""Barriers at which somebody is not ready to wait for ever."""

from __future__ import annotations

from tests.support.coordinator import Story, four, killed, wait, worker


def test_time_out_of_one_releases_all_and_names_who_is_missing() -> None:
    story = four()
    patient = story.send(wait("w0"))
    hasty = story.send(wait("w1", timeout_s=5))
    story.send(wait("w2", timeout_s=9))
    story.after(4.9)
    assert story.release(patient) is None
    story.after(0.1)
    answer = story.told(hasty)
    assert answer is story.told(patient)
    assert (answer.released_by, answer.arrived, answer.missing) == ("timeout", ["w0", "w1", "w2"], ["w3"])
    assert answer.reason == "barrier 'b' of 4 took too long: missing w3; w0, w1 and w2 came."
    late = story.send(wait("w3", timeout_s=5))
    assert story.release(late) is None
    story.after(5)
    assert (story.told(late).generation, story.told(late).missing) == (1, ["w0", "w1", "w2"])


def test_asking_again_does_not_give_an_arrival_more_time() -> None:
    story = four()
    first = story.send(wait("w0", timeout_s=5))
    story.after(3)
    again = story.send(wait("w0", timeout_s=5))
    story.after(2)
    assert story.told(again).released_by == "timeout"
    assert story.release(first) is None


def test_time_out_of_nothing_only_looks() -> None:
    story = four()
    assert story.told(story.send(wait("w0", timeout_s=0))).missing == ["w1", "w2", "w3"]


def test_time_out_names_ranks_for_which_nobody_registered() -> None:
    story = Story()
    story.send(worker("w0"))
    story.send(worker("w2"))
    token = story.send(wait("w0", timeout_s=5))
    story.after(5)
    assert story.told(token).missing == ["w2"]
    assert "rank 1 (nobody registered for it) and rank 3 (nobody registered for it)" in story.told(token).reason


def test_time_out_counts_those_whom_it_can_not_name() -> None:
    story = Story()
    story.send(worker("a", rank=-1))
    token = story.send(wait("a", timeout_s=5))
    story.after(5)
    assert "missing 3 of whom nobody registered" in story.told(token).reason


def test_time_out_of_a_shrunk_barrier_names_the_lost_too() -> None:
    story = four()
    story.tell(killed("w3"))
    token = story.send(wait("w0", timeout_s=5, on_loss="shrink"))
    story.after(5)
    assert (story.told(token).missing, story.told(token).lost) == (["w1", "w2"], ["w3"])
    assert "missing w1, w2 and w3 (gone, as it was killed by signal 9); w0 came" in story.told(token).reason
