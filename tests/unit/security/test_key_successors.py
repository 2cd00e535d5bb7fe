"""A key and its successor: which pair is shown, taken and listened with at which time, and how files say so."""

import itertools
import os
import time
from pathlib import Path

import pytest

from unified.errors import KeyFileError
from unified.security.handshakes import MAX_OTHERS, KeyChoice
from unified.security.keys import (
    CLOCK_SKEW_S,
    LISTENER_S,
    ClusterKey,
    KeyWatch,
    accepted,
    current,
    learn,
    load_key,
    master_listener,
    met,
    rotate_key,
    time_text,
    write_key,
)

numbers = itertools.count()


def pair() -> ClusterKey:
    """Return a pair that no other test has: what a process learns, it keeps."""
    number = next(numbers)
    return ClusterKey(public=f"p{number:039}", secret=f"s{number:039}")


def then(key: ClusterKey, successor: ClusterKey, at: float) -> ClusterKey:
    return ClusterKey(key.public, key.secret, successor, at)


def test_both_are_taken_around_the_change_and_the_old_one_is_refused_after() -> None:
    old, new = pair(), pair()
    assert learn(then(old, new, 1000.0))
    assert not learn(then(old, new, 1000.0)), "no news"
    assert not learn(old)
    assert not learn(None)
    assert current(old, 999.0).public == old.public
    assert current(old, 1000.0) == new
    assert [each.public for each in accepted(old, 999.0)] == [old.public, new.public]
    assert [each.public for each in accepted(old, 1000.0 + CLOCK_SKEW_S - 1)] == [new.public, old.public]
    assert accepted(old, 1000.0 + CLOCK_SKEW_S) == [new]
    assert accepted(new, 0.0) == [new], "who has the new pair alone knows of no older one"


def test_a_key_may_be_replaced_again_for_those_who_hold_the_first_one() -> None:
    first, second, third = pair(), pair(), pair()
    learn(then(first, second, 1000.0))
    learn(then(second, third, 2000.0))
    assert [current(first, at).public for at in (0.0, 1500.0, 2000.0)] == [first.public, second.public, third.public]
    assert [each.public for each in accepted(first, 2001.0)] == [third.public, second.public]


def test_the_listener_of_a_master_is_tried_with_both_pairs_in_turn() -> None:
    old, new, alone = pair(), pair(), pair()
    learn(then(old, new, time.time() - 1))
    assert [master_listener(old, attempt) for attempt in range(3)] == [new.public, old.public, new.public]
    assert [master_listener(alone, attempt) for attempt in range(2)] == [alone.public] * 2
    assert master_listener(None) == ""


def test_the_older_listener_is_tried_no_more_once_the_master_has_shown_the_newer_one_or_days_later() -> None:
    old, new, forgotten, latest = pair(), pair(), pair(), pair()
    learn(then(old, new, time.time() - 1))
    met(new.public)
    assert [master_listener(old, attempt) for attempt in range(2)] == [new.public] * 2
    learn(then(forgotten, latest, time.time() - LISTENER_S - 1))
    assert [master_listener(forgotten, attempt) for attempt in range(2)] == [latest.public] * 2


def test_a_client_whose_clock_is_behind_tries_the_listener_of_a_minute_later() -> None:
    old, new = pair(), pair()
    learn(then(old, new, time.time() + CLOCK_SKEW_S - 5))
    assert [master_listener(old, attempt) for attempt in range(2)] == [old.public, new.public]
    learn(then(old, new, time.time() + CLOCK_SKEW_S + 5))
    assert [master_listener(old, attempt) for attempt in range(2)] == [old.public] * 2


def test_the_time_of_a_change_may_be_moved() -> None:
    old, new = pair(), pair()
    learn(then(old, new, 1000.0))
    assert learn(then(old, new, 500.0))
    assert current(old, 600.0) == new


def test_a_file_has_both_pairs_and_the_time(tmp_path: Path) -> None:
    path, old, new = tmp_path / "cluster.key", pair(), pair()
    write_key(path, old)
    path.chmod(0o400)
    link = tmp_path / "link"
    link.symlink_to(path)
    at = float(int(time.time()) + 3600)
    assert rotate_key(link, new, at) == old
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o400
    assert load_key(path) == then(old, new, at)
    assert current(load_key(path)).public == old.public
    assert sorted(os.listdir(tmp_path)) == ["cluster.key", "link"]
    with pytest.raises(KeyFileError, match="has a successor already, SHA256:"):
        rotate_key(path, pair(), at)
    assert load_key(path) == then(old, new, at)


def test_a_pair_whose_time_is_over_leaves_the_file_with_the_next_rotation(tmp_path: Path) -> None:
    path, first, second, third = tmp_path / "cluster.key", pair(), pair(), pair()
    write_key(path, first)
    rotate_key(path, second, float(int(time.time()) - 10))
    assert rotate_key(path, third, 4e9) == second
    assert load_key(path) == then(second, third, 4e9)
    assert first.secret not in path.read_text()


@pytest.mark.parametrize(("before", "after"), [('from = "', 'from = "tomorrow'), ("secret-key", "secret-kex")])
def test_a_broken_second_half_is_no_key(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / "cluster.key"
    write_key(path, then(pair(), pair(), 4e9))
    head, middle, tail = path.read_text().rpartition(before)
    path.write_text(f"{head}{middle.replace(before, after)}{tail}")
    with pytest.raises(KeyFileError, match="is no cluster key"):
        load_key(path)


def test_a_daemon_hears_of_a_successor_once_and_of_a_strange_key_too(caplog: pytest.LogCaptureFixture) -> None:
    old, new = pair(), pair()
    found = old
    watch = KeyWatch(old, lambda: found)
    assert watch.next_deadline is not None
    assert watch.look() is None
    found = then(old, new, 4e9)
    with caplog.at_level("INFO"):
        assert watch.look() == found
        assert watch.look() is None
        found = old
        assert watch.look() is None
        found = pair()
        assert watch.look() is None
        assert watch.look() is None
    assert [record.message.partition(" ")[0] for record in caplog.records] == [
        "event=key-successor",
        "event=key-unread",
        "event=key-unread",
    ]
    assert "the key file no longer has the successor" in caplog.records[1].message
    assert f"from={time_text(4e9)}" in caplog.text
    assert new.secret not in caplog.text
    assert KeyWatch(None, lambda: found).next_deadline is None


def test_a_daemon_keeps_its_key_while_the_file_cannot_be_read(caplog: pytest.LogCaptureFixture) -> None:
    def find() -> ClusterKey:
        raise KeyFileError("the cluster key k cannot be read: gone.")

    watch = KeyWatch(pair(), find)
    assert [watch.look(), watch.look()] == [None, None]
    assert caplog.text.count("gone") == 1


def test_a_client_tries_other_keys_at_once_but_not_for_ever() -> None:
    old, new = pair(), pair()
    choice = KeyChoice(old)
    assert choice.pick() == old.public
    assert not choice.failed(), "there is no other"
    learn(then(old, new, time.time() - 1))
    tried = []
    while choice.failed():
        tried.append(choice.pick())
    assert sorted(tried) == sorted([old.public, new.public])
    assert len(tried) == MAX_OTHERS


def test_a_client_reads_the_file_when_it_is_refused() -> None:
    old, new = pair(), pair()
    choice = KeyChoice(old, lambda: then(old, new, 1.0))
    choice.pick()
    assert choice.failed()
    assert current(old) == new
    assert not KeyChoice(None, lambda: new).failed()
