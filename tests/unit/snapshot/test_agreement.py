"""The agreement of ranks on the newest snapshot that all of them find."""

import pytest

from unified.protocol.snapshots import (
    HeldElsewhere,
    HeldSnapshot,
    RankReport,
    ServerAddress,
    SnapshotStamp,
    StoredSnapshot,
)
from unified.snapshot.core.agreement import agree, describe_source, partner_of


def server(node: str) -> ServerAddress:
    return ServerAddress(node=node, url=f"tcp://{node}:1", token="t")


def held(rank: int, step: int, *, round_number: int = 1, size: int = 2, is_copy: bool = False) -> HeldSnapshot:
    stamp = SnapshotStamp(round_number, step)
    return HeldSnapshot(world_size=size, rank=rank, stamp=stamp, length=step, is_copy=is_copy)


def stored(step: int, job_id: str = "job-1", round_number: int = 1) -> StoredSnapshot:
    return StoredSnapshot(job_id=job_id, stamp=SnapshotStamp(round_number, step))


def report(node: str, *snapshots: HeldSnapshot, on_storage: tuple[StoredSnapshot, ...] = ()) -> RankReport:
    return RankReport(server=server(node), held=list(snapshots), stored=list(on_storage))


def chosen(*reports: RankReport, step: int | None = None, is_replicated: bool = False) -> tuple[int, list[str]] | None:
    found = agree(reports, "job-1", "trainer", step=step, is_replicated=is_replicated)
    if found.snapshot is None:
        return None
    words = [describe_source(source, one.server) for source, one in zip(found.sources, reports, strict=True)]
    return found.snapshot.stamp.step, words


def test_nothing_is_held_at_the_first_start() -> None:
    found = agree([report("a"), report("b")], "job-1", "trainer")
    assert (found.snapshot, found.note) == (None, "")


def test_the_newest_that_all_hold_wins() -> None:
    assert chosen(report("a", held(0, 4), held(0, 5)), report("b", held(1, 3), held(1, 4))) == (4, ["memory"] * 2)


def test_a_lost_rank_takes_the_copy_of_its_partner_which_may_be_on_its_own_node_by_now() -> None:
    here = report("a", held(0, 4), held(1, 4, is_copy=True))
    assert chosen(here, report("c")) == (4, ["memory", "partner"])
    assert chosen(here, report("a")) == (4, ["memory", "partner"])


def test_storage_comes_last_and_fills_the_gaps() -> None:
    left = report("a", held(0, 4), on_storage=(stored(4), stored(2)))
    assert chosen(left, report("b", on_storage=(stored(4),))) == (4, ["memory", "storage"])
    assert chosen(left, report("b", on_storage=(stored(2),))) == (2, ["storage", "storage"])


def test_a_later_round_goes_before_a_higher_step_of_one_that_was_rolled_back() -> None:
    ranks = [[held(rank, 20), held(rank, 16, round_number=2)] for rank in (0, 1)]
    assert chosen(report("a", *ranks[0]), report("b", *ranks[1])) == (16, ["memory"] * 2)


def test_equal_steps_of_different_rounds_are_not_mixed() -> None:
    assert chosen(report("a", held(0, 7)), report("b", held(1, 7, round_number=2))) is None


def test_this_job_goes_before_an_earlier_one_on_the_same_storage() -> None:
    both = (stored(90, "job-0", 5), stored(3))
    assert chosen(report("a", on_storage=both), report("b", on_storage=both)) == (3, ["storage"] * 2)
    early = (stored(80, "job-0", 9), stored(90, "job-0", 5))
    assert chosen(report("a", on_storage=early), report("b", on_storage=early)) == (90, ["storage"] * 2)


def test_one_step_can_be_asked_for() -> None:
    reports = report("a", held(0, 4), held(0, 5)), report("b", held(1, 4), held(1, 5))
    assert chosen(*reports, step=4) == (4, ["memory"] * 2)
    assert chosen(*reports, step=3) is None


def test_another_world_size_is_told_and_not_restored_unless_all_ranks_have_the_same() -> None:
    reports = report("a", held(0, 4, size=4), held(1, 4, size=4)), report("b")
    assert "taken by 4 ranks, and now there are 2" in agree(reports, "job-1", "trainer").note
    assert chosen(*reports, is_replicated=True) == (4, ["memory", "partner"])


def test_ranks_without_a_common_step_are_named() -> None:
    note = agree([report("a", held(0, 4)), report("b", held(1, 3)), report("c")][:2], "job-1", "trainer").note
    assert note == "no step is held for every rank; there are rank 0: [4], rank 1: [3]"


@pytest.mark.parametrize(
    ("nodes", "partners"),
    [("aabb", "bbaa"), ("abc", "bca"), ("aaa", None), ("a", None), ("abab", "baba")],
)
def test_the_partner_is_on_the_next_node(nodes: str, partners: str | None) -> None:
    servers = [server(node) for node in nodes]
    found = [partner_of(rank, servers) for rank in range(len(nodes))]
    assert [each.node if each is not None else None for each in found] == list(partners or [None] * len(nodes))


def test_a_copy_node_has_what_the_ranks_nodes_lost() -> None:
    asked = RankReport(
        server=server("b"), elsewhere=[HeldElsewhere(server("s"), [held(0, 4, is_copy=True), held(1, 4)])]
    )
    assert chosen(asked, report("b")) == (4, ["partner", "partner"])
    found = agree([asked, report("b")], "job-1", "trainer")
    assert [source.server for source in found.sources] == [server("s")] * 2


def test_nodes_that_all_workers_have_left_have_a_newer_one_than_those_where_they_are_again() -> None:
    left = [HeldElsewhere(server(node), [held(rank, 9, round_number=3)]) for rank, node in enumerate("ab")]
    asked = RankReport(server=server("c"), held=[held(0, 12)], elsewhere=left)
    assert chosen(asked, report("d", held(1, 12))) == (9, ["partner", "partner"])


@pytest.mark.parametrize(("lost_round", "is_said"), [(2, True), (1, False)])
def test_an_older_one_is_not_taken_without_a_word_if_a_newer_one_may_be_lost(lost_round: int, is_said: bool) -> None:
    asked = RankReport(server=server("a"), held=[held(0, 4)], elsewhere=[HeldElsewhere(server("x"), [], lost_round)])
    found = agree([asked, report("b", held(1, 4))], "job-1", "trainer")
    assert found.snapshot is not None
    assert ("x had workers in a later round, and does not answer" in found.note) == is_said


def test_an_older_one_is_not_taken_without_a_word_if_another_number_of_ranks_took_a_newer_one() -> None:
    newer = [held(0, 9, round_number=2, size=3), held(1, 9, round_number=2, size=3)]
    found = agree([report("a", held(0, 4), newer[0]), report("b", held(1, 4), newer[1])], "job-1", "trainer")
    assert found.snapshot == stored(4)
    assert found.note == "a newer one was taken by 3 ranks, and now there are 2"


def test_a_node_that_others_cannot_reach_neither_gives_nor_takes() -> None:
    hidden = ServerAddress(node="h", url="", token="t")
    servers = [server("a"), hidden, server("b")]
    assert [partner_of(rank, servers) for rank in range(3)] == [server("b"), None, server("a")]
    there = RankReport(server=hidden, held=[held(0, 4), held(1, 4)])
    assert chosen(there, RankReport(server=hidden)) == (4, ["memory"] * 2)
    assert chosen(there, report("b")) is None
