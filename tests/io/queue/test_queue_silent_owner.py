"""An owner that lives and does not answer: what is asked of it ends in time, and nothing is lost or doubled by that."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.deadlines import missed
from tests.support.queue_members import DEADLINE_S, QueueWorld, begun
from tests.support.queue_owner import Own, OwnerProcess
from unified.errors import QueueNotFoundError
from unified.queue import owner_lookup

pytestmark = pytest.mark.processes

SHORT_S = missed(0.1)


@pytest.fixture
def owner(own: Own, monkeypatch: pytest.MonkeyPatch) -> OwnerProcess:
    monkeypatch.setattr(owner_lookup, "GRACE_S", 5 * SHORT_S)
    return own(size=4)


def test_waits_for_an_owner_that_is_stopped_end(world: QueueWorld, owner: OwnerProcess) -> None:
    consumer, producer = world.worker("consumer"), world.worker("producer")
    ours, theirs = consumer.queue(), producer.queue(owner_timeout=SHORT_S)
    theirs.put("a", "b")
    with ThreadPoolExecutor(1) as one_thread:

        def take(batch_size: int, timeout: float) -> Any:
            return one_thread.submit(ours.get, batch_size, timeout).result(DEADLINE_S)

        assert take(1, DEADLINE_S) == ["a"]
        owner.stop()
        assert take(1, SHORT_S) == []
        assert take(1, 0.0) == []
        with pytest.raises(QueueNotFoundError, match=r"owner, which owns queue 'q', is alive but did not answer"):
            begun(theirs.put, "c", timeout=SHORT_S).result(DEADLINE_S)
        for ask in (theirs.qsize, theirs.close):
            with pytest.raises(QueueNotFoundError, match="may have heard"):
                begun(ask).result(DEADLINE_S)
        waiting = theirs.put_async("d")
        owner.go_on()
        assert take(1, DEADLINE_S) == ["b"]
        with pytest.raises(Exception, match="is closed: 0 of 1 items went in"):  # `close` was heard after all
            waiting.result(DEADLINE_S)
        assert take(1, SHORT_S) in ([], ["c"])


def test_a_client_that_was_not_known_to_it_before_says_who_is_silent(world: QueueWorld, owner: OwnerProcess) -> None:
    ours = world.worker("consumer").queue(owner_timeout=SHORT_S)
    owner.stop()
    with pytest.raises(QueueNotFoundError, match="worker owner, which owns queue 'q', is alive but did not answer"):
        begun(ours.get).result(DEADLINE_S)
    owner.go_on()
    assert begun(ours.qsize).result(DEADLINE_S) == 0
