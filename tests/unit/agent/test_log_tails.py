"""What of the newest output an agent sends its master: little, and of every stream."""

from pathlib import Path

from unified_agent.logs.tails import BURST, EVERY_S, LAST_BYTES, LAST_OF_GOOD, RATE, Tail, TailFeed

ONE, OTHER = Path("/logs/job/w-0/0.out"), Path("/logs/job/w-1/0.out")


def test_what_was_written_is_sent_once_a_moment_later() -> None:
    feed = TailFeed()
    assert feed.due_at is None
    feed.wrote(ONE, 100, 10.0)
    feed.wrote(ONE, 200, 12.0)
    assert feed.due_at == 10.0 + EVERY_S
    assert feed.take(15.0) == [Tail(ONE, 0, 200)]
    assert feed.due_at is None
    feed.wrote(ONE, 250, 16.0)
    assert feed.take(21.0) == [Tail(ONE, 200, 50)]
    assert feed.end(ONE, 22.0, has_failed=True) is None


def test_the_end_of_a_worker_that_failed_is_sent_in_large() -> None:
    feed = TailFeed()
    for path in (ONE, OTHER):
        feed.wrote(path, 10**6, 0.0)
    assert feed.end(ONE, 1.0, has_failed=True) == Tail(ONE, 10**6 - LAST_BYTES, LAST_BYTES)
    assert feed.end(OTHER, 1.0, has_failed=False) == Tail(OTHER, 10**6 - LAST_OF_GOOD, LAST_OF_GOOD)
    assert feed.take(5.0) == []


def test_the_rate_is_bounded_and_every_stream_has_its_turn() -> None:
    feed = TailFeed()
    paths = [Path(f"/logs/job/w-{number}/0.out") for number in range(1000)]
    sent: dict[Path, int] = {}
    now, size = 0.0, 0
    for _ in range(200):
        size += 10**6
        for path in paths:
            feed.wrote(path, size, now)
        assert feed.due_at is not None
        now = feed.due_at
        for tail in feed.take(now):
            assert tail.offset + tail.nbytes == size
            sent[tail.path] = sent.get(tail.path, 0) + tail.nbytes
    assert sum(sent.values()) <= BURST + RATE * now
    assert sent.keys() == set(paths)
    assert max(sent.values()) <= 4 * min(sent.values())
