"""An owner that lives and does not answer: what is asked of it ends in time, and nothing is lost or doubled by that."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.queue_members import QueueWorld
from tests.support.queue_owner import OwnerProcess
from unified.errors import QueueNotFoundError
from unified.queue import owner_lookup

PATIENCE_S = 20.0
SHORT_S = 0.1


def in_time(work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What it returns, long before a call of which nobody knows how long its user waits would be given up."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(work, *arguments, **options).result(PATIENCE_S)
    finally:
        pool.shutdown(wait=False)


@pytest.fixture
def owner(world: QueueWorld, monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnerProcess]:
    monkeypatch.setattr(owner_lookup, "GRACE_S", 5 * SHORT_S)
    process = OwnerProcess("owner", world.run_dir, world.route, world.relay, size=4)
    world.add("owner", process.inbox, {"queue/q": 1})
    yield process
    process.close()


def test_waits_for_an_owner_that_is_stopped_end(world: QueueWorld, owner: OwnerProcess) -> None:
    consumer, producer = world.worker("consumer"), world.worker("producer")
    ours, theirs = consumer.queue(), producer.queue(owner_timeout=SHORT_S)
    theirs.put("a", "b")
    with ThreadPoolExecutor(1) as one_thread:

        def take(batch_size: int, timeout: float) -> Any:
            return one_thread.submit(ours.get, batch_size, timeout).result(PATIENCE_S)

        assert take(1, PATIENCE_S) == ["a"]
        owner.stop()
        assert take(1, SHORT_S) == []
        assert take(1, 0.0) == []
        with pytest.raises(QueueNotFoundError, match=r"worker owner, which owns queue 'q', lives and does not answer"):
            in_time(theirs.put, "c", timeout=SHORT_S)
        for ask in (theirs.qsize, theirs.close):
            with pytest.raises(QueueNotFoundError, match="may have heard"):
                in_time(ask)
        waiting = theirs.put_async("d")
        owner.go_on()
        assert take(1, PATIENCE_S) == ["b"]
        with pytest.raises(Exception, match="is closed: 0 of 1 items went in"):  # `close` was heard after all
            waiting.result(PATIENCE_S)
        assert take(1, SHORT_S) in ([], ["c"])


def test_a_client_that_was_not_known_to_it_before_says_who_is_silent(world: QueueWorld, owner: OwnerProcess) -> None:
    ours = world.worker("consumer").queue(owner_timeout=SHORT_S)
    owner.stop()
    with pytest.raises(QueueNotFoundError, match="worker owner, which owns queue 'q', lives and does not answer"):
        in_time(ours.get)
    owner.go_on()
    assert in_time(ours.qsize) == 0
