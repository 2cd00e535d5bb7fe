"""What changed since a version."""

import pytest

from unified_master.core import changes as changes_module
from unified_master.core.changes import ChangedPart, ChangeLog

JOB, OTHER, NODE = ChangedPart("job", "a"), ChangedPart("job", "b"), ChangedPart("node", "", "a")
WORKER = ChangedPart("worker", "a", "w")


def test_what_changed_comes_in_the_order_of_its_last_change() -> None:
    log = ChangeLog(100)
    for part in (JOB, WORKER, OTHER, NODE, JOB):
        log.touch(part)
    assert log.since(100, 10) == ([WORKER, OTHER, NODE, JOB], 105)
    assert log.since(103, 10) == ([NODE, JOB], 105)
    assert log.since(105, 10) == ([], 105)
    assert log.since(100, 10, "a") == ([WORKER, JOB], 105)
    assert (log.has_changed(102, "b"), log.has_changed(103, "b"), log.has_changed(0, "no job")) == (True, False, False)


def test_a_limit_leaves_the_rest_to_the_next_question() -> None:
    log = ChangeLog()
    for part in (JOB, WORKER, OTHER):
        log.touch(part)
    parts, version = log.since(0, 2)
    assert (parts, version) == ([JOB, WORKER], 2)
    assert log.since(version, 2) == ([OTHER], 3)


def test_what_is_removed_is_told_with_all_that_belonged_to_it() -> None:
    log = ChangeLog()
    for part in (JOB, WORKER, NODE):
        log.touch(part)
    log.remove(JOB)
    log.remove(NODE)
    assert log.since(0, 10) == ([ChangedPart("gone-job", "a"), ChangedPart("gone-node", "", "a")], 5)
    assert not log.has_changed(0, "a")
    assert log.version_of(WORKER) == 0
    log.touch(NODE)
    assert log.since(5, 10) == ([NODE], 6)


def test_removals_are_bounded_and_who_missed_one_is_not_told_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes_module, "MAX_GONE", 2)
    log = ChangeLog(10)
    for number in range(4):
        log.touch(ChangedPart("job", f"j{number}"))
        log.remove(ChangedPart("job", f"j{number}"))
    assert log.floor == 14, "removals up to this version are forgotten"
    assert [part.job_id for part in log.since(log.floor, 10)[0]] == ["j2", "j3"]


def test_a_beginning_leads_to_where_one_can_go_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever begins, beside parts that have not changed for long, would be sent to the beginning for ever."""
    monkeypatch.setattr(changes_module, "MAX_GONE", 2)
    log = ChangeLog()
    old = [ChangedPart("node", "", f"n{number}") for number in range(5)]
    for part in old:
        log.touch(part)
    for number in range(4):
        log.touch(ChangedPart("job", f"j{number}"))
        log.remove(ChangedPart("job", f"j{number}"))
    for part in (JOB, OTHER):
        log.touch(part)
    told, reached = log.since(log.first, 2)
    assert (told, reached) == (old, log.floor)
    rest, reached = log.since(reached, 2)
    assert [part.job_id for part in rest] == ["j2", "j3"]
    assert log.since(reached, 2) == ([JOB, OTHER], log.version)
