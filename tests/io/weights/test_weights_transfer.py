"""Versions of a model from one worker to others, over real sockets: whole, in order, whoever dies on the way."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.support.bus import DEADLINE_S
from tests.support.deadlines import missed
from tests.support.weights import SMALL, Cast, fill, model_of, one_route, values_of
from unified.errors import WeightsError, WeightsTimeoutError, WeightsVersionError
from unified.protocol.records import Reachability, WorkerIncarnation
from unified.testing import eventually
from unified.weights.handshake import method
from unified.weights.receiver import WeightsReceiver
from unified.weights.state_dict import OutgoingStateDict
from unified.weights.transfer_plan import TransferPlan
from unified.weights.versions import SUPERSEDED


def test_versions_reach_everybody_and_get_into_models(cast: Cast) -> None:
    first, second = cast.receiver("r0"), cast.receiver("r1", copy=True)
    sender = cast.sender()
    for number in (1, 2, 3):
        assert cast.send(sender, model_of(number), bucket_bytes=SMALL) == number
        for receiver in (first, second):
            model = model_of(0)
            assert receiver.version == number
            assert receiver.load_into(model, min_version=number, timeout=0) == number
            assert values_of(model.state_dict()) == {number}
            assert receiver.state_dict().version == number


def test_workers_of_another_node_are_reached_through_one_of_them(cast: Cast) -> None:
    for name, node in {"r0": "here", "r1": "there", "r2": "there", "r3": "there"}.items():
        cast.receiver(name)
        cast.nodes[name] = node
    sender = cast.sender()
    sent_to: set[tuple[str, ...]] = set()
    bus = cast.buses["trainer"]
    call_many = bus.call_many

    def spy(targets: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == method("default", "bucket"):
            sent_to.add(tuple(targets))
        return call_many(targets, name, *args, **kwargs)

    bus.call_many = spy  # type: ignore[method-assign, assignment]  # it looks on
    assert cast.send(sender, model_of(1), bucket_bytes=SMALL) == 1
    assert sent_to == {("r0", "r1")}
    assert [values_of(receiver.state_dict()) for receiver in cast.receivers.values()] == [{1}] * 4


@one_route
def test_the_sender_waits_for_receivers_that_are_not_there_yet(cast: Cast, pool: ThreadPoolExecutor) -> None:
    cast.receiver("r0")
    cast.worker("r1")
    sender = cast.sender()
    asked = threading.Semaphore(0)
    bus = cast.buses["trainer"]
    call_many = bus.call_many

    def spy(*args: Any, **kwargs: Any) -> Any:
        asked.release()
        return call_many(*args, **kwargs)

    bus.call_many = spy  # type: ignore[method-assign]  # it looks on
    sent = pool.submit(cast.send, sender, model_of(1), "r0", "r1", "r2", require=3)
    assert asked.acquire(timeout=DEADLINE_S)
    cast.receiver("r2")  # it begins only now
    assert asked.acquire(timeout=DEADLINE_S)
    cast.receivers["r1"] = WeightsReceiver(bus=cast.buses["r1"])
    assert sent.result(DEADLINE_S) == 1
    assert {receiver.version for receiver in cast.receivers.values()} == {1}


@one_route
def test_a_worker_without_receiver_is_named(cast: Cast) -> None:
    first = cast.receiver("r0")
    cast.worker("r1")
    sender = cast.sender()
    no_receiver = r"r1: there is no WeightsReceiver\('default'\) there"
    with pytest.raises(WeightsTimeoutError, match=rf"(?s)did not reach:.*{no_receiver}"):
        cast.send(sender, model_of(1), "r0", "r1", timeout=3.0, require=2)  # so long that a busy machine can answer
    with pytest.raises(WeightsTimeoutError, match=r"r2: it has not started yet"):
        cast.send(sender, model_of(1), "r2", timeout=missed(0.2))  # alone: another would have to answer in this time
    assert first.version == 0
    assert cast.send(sender, model_of(1), "r0", "r1", "r2") == 1
    assert (cast.synced.receivers, first.version) == (("r0",), 1)
    assert list(cast.synced.left_out) == ["r1", "r2"]
    assert cast.synced.left_out["r2"] == "it has not started yet"


@one_route
def test_a_dead_receiver_does_not_hold_up_a_sync_and_catches_up(cast: Cast) -> None:
    cast.receiver("r0")
    cast.receiver("r1")
    sender = cast.sender()
    assert cast.send(sender, model_of(1)) == 1
    assert cast.synced.left_out == {}
    cast.die("r1")
    assert cast.send(sender, model_of(2), "r0", "r1") == 2
    assert cast.synced.receivers == ("r0",)
    assert cast.synced.left_out == {"r1": "its incarnation 0 ended (it was killed) and the next has not begun"}
    fresh = cast.receiver("r1", 1)
    assert values_of(fresh.state_dict()) == {2}  # before anybody can use it
    assert cast.send(sender, model_of(3), "r0", "r1") == 3
    assert [*cast.synced.receivers] == ["r0", "r1"]
    assert values_of(fresh.state_dict()) == {3}


def test_a_receiver_made_during_a_sync_that_left_it_out_gets_its_version(cast: Cast, pool: ThreadPoolExecutor) -> None:
    cast.receiver("r0")
    cast.receiver("r1")
    sender = cast.sender()
    cast.send(sender, model_of(1))
    cast.die("r1")
    holdup = Holdup(cast, "r0", "commit")
    sent = pool.submit(cast.send, sender, model_of(2), "r0", "r1")
    assert holdup.reached.wait(DEADLINE_S)
    fresh = cast.receiver("r1", 1)
    assert fresh.version == 1
    holdup.release.set()
    assert sent.result(DEADLINE_S) == 2
    assert (cast.synced.receivers, cast.synced.left_out) == (("r0", "r1"), {})
    assert values_of(fresh.state_dict()) == {2}


@one_route
def test_a_member_that_dies_while_another_catches_up_from_it_is_replaced(cast: Cast, pool: ThreadPoolExecutor) -> None:
    for name in ("r0", "r1"):
        cast.receiver(name)
    cast.send(cast.sender(), model_of(1))
    holdups = {name: Holdup(cast, name, "pull") for name in ("r0", "r1")}
    caught_up = pool.submit(cast.receiver, "r2")
    eventually(lambda: any(each.reached.is_set() for each in holdups.values()))
    first = next(name for name, each in holdups.items() if each.reached.is_set())
    for each in holdups.values():
        each.release.set() if each is not holdups[first] else None
    cast.die(first)
    holdups[first].release.set()
    assert values_of(caught_up.result(DEADLINE_S).state_dict()) == {1}


@one_route
def test_a_worker_that_was_left_out_takes_the_place_of_one_that_is_lost(cast: Cast, pool: ThreadPoolExecutor) -> None:
    cast.receiver("r0")
    sender = cast.sender()
    holdup = Holdup(cast, "r0", "bucket")
    sent = pool.submit(cast.send, sender, model_of(1), "r0", "r1")
    assert holdup.reached.wait(DEADLINE_S)
    late = cast.receiver("r1")
    cast.die("r0")
    holdup.release.set()
    assert sent.result(DEADLINE_S) == 1
    assert cast.synced.receivers == ("r1",)
    assert list(cast.synced.left_out) == ["r0"]
    assert values_of(late.state_dict()) == {1}


@one_route
def test_a_receiver_beside_a_second_attempt_of_the_sync_is_made_with_its_version(
    cast: Cast, pool: ThreadPoolExecutor
) -> None:
    """The attempt takes the place of the transfer from a member, so the constructor has to wait for the attempt."""
    cast.receiver("r0")
    cast.receiver("r1")
    cast.send(cast.sender(), model_of(1))
    cast.die("r1")
    worker = cast.worker("r1", 1)
    cast.worker("other")
    pulled = Holdup(cast, "r0", "pull")
    made = pool.submit(WeightsReceiver, bus=worker)
    assert pulled.reached.wait(DEADLINE_S)
    plan, buckets = opened(cast, 1, 1.0, "other", to="r1")
    pulled.release.set()
    with pytest.raises(TimeoutError):
        made.result(missed(0.3))
    for index, tensors in enumerate(buckets):
        told(cast, "other", "bucket", plan.session, index, tensors, to="r1")
    assert told(cast, "other", "commit", plan.session, to="r1") is None
    receiver = cast.receivers["r1"] = made.result(DEADLINE_S)
    assert receiver.version == 1


@one_route
def test_a_sync_that_fails_tells_those_it_left_out_who_has_the_version(cast: Cast, pool: ThreadPoolExecutor) -> None:
    cast.receiver("r0")
    cast.receiver("bad")
    sender = cast.sender()
    cast.send(sender, model_of(1))
    registry = cast.buses["bad"].registry
    registry[method("default", "commit")] = lambda session: 1 / 0
    holdup = Holdup(cast, "r0", "commit")
    sent = pool.submit(cast.send, sender, model_of(2), "r0", "bad", "r1")
    assert holdup.reached.wait(DEADLINE_S)
    late = cast.receiver("r1")
    assert late.version == 1
    holdup.release.set()
    with pytest.raises(WeightsError, match="division by zero"):
        sent.result(DEADLINE_S)
    assert late.wait(2, timeout=DEADLINE_S) == 2


@one_route
def test_a_sync_returns_when_a_receiver_that_came_meanwhile_has_the_version(
    cast: Cast, pool: ThreadPoolExecutor
) -> None:
    """Else it would answer with older weights than the others have, after the sync."""
    cast.receiver("r0")
    sender = cast.sender()
    committing, pulled = Holdup(cast, "r0", "commit"), Holdup(cast, "r0", "pull")
    sent = pool.submit(cast.send, sender, model_of(1), "r0", "r1")
    assert committing.reached.wait(DEADLINE_S)
    late = cast.receiver("r1")
    assert late.version == 0
    committing.release.set()
    assert pulled.reached.wait(DEADLINE_S)
    with pytest.raises(TimeoutError):
        sent.result(missed(0.3))
    pulled.release.set()
    assert sent.result(DEADLINE_S) == 1
    assert late.version == 1
    assert (set(cast.synced.receivers), cast.synced.left_out) == ({"r0", "r1"}, {})


@one_route
@pytest.mark.parametrize("wait", [True, False])
def test_a_receiver_that_came_meanwhile_and_freezes_is_left_out(
    cast: Cast, pool: ThreadPoolExecutor, wait: bool
) -> None:
    cast.receiver("r0")
    sender = cast.sender()
    committing, pulled = Holdup(cast, "r0", "commit"), Holdup(cast, "r0", "pull")
    sent = pool.submit(cast.send, sender, model_of(1), "r0", "r1", wait=wait, timeout=missed(3))
    assert committing.reached.wait(DEADLINE_S)
    late = cast.receiver("r1")
    committing.release.set()
    assert pulled.reached.wait(DEADLINE_S)
    assert sent.result(DEADLINE_S) == 1
    assert list(cast.synced.left_out) == ["r1"]
    assert late.version == 0
    assert cast.send(sender, model_of(2), "r0", wait=wait) == 2  # without a wait, none is left over from before
    pulled.release.set()


@one_route
def test_versions_go_up_unless_forced(cast: Cast) -> None:
    receiver = cast.receiver("r0")
    sender = cast.sender()
    assert cast.send(sender, model_of(1), version=10) == 10
    with pytest.raises(WeightsVersionError, match=r"version 9 of .* was not sent: worker r0 has version 10"):
        cast.send(sender, model_of(2), version=9)
    assert values_of(receiver.state_dict()) == {1}
    assert cast.send(sender, model_of(3), version=10) == 10  # once more, not back
    assert values_of(receiver.state_dict()) == {3}
    assert cast.send(sender, model_of(4), version=5, force=True) == 5
    assert receiver.version == 5
    assert cast.send(sender, model_of(5)) == 11  # never a number that this sender gave before


def test_numbers_go_on_after_a_restart_of_either_side(cast: Cast) -> None:
    cast.receiver("r0")
    cast.receiver("r1")
    sender = cast.sender()
    assert [cast.send(sender, model_of(1)) for _ in range(3)] == [1, 2, 3]
    cast.die("trainer")
    sender = cast.sender(incarnation=1)
    assert cast.send(sender, model_of(2)) == 4
    cast.die("r1")
    fresh = cast.receiver("r1", 1)
    assert fresh.version == 4
    assert cast.send(sender, model_of(3)) == 5
    assert {receiver.version for receiver in cast.receivers.values()} == {5}


class Holdup:
    def __init__(self, cast: Cast, worker: str, verb: str, at: int = 1) -> None:
        self.reached, self.release = threading.Event(), threading.Event()
        registry = cast.buses[worker].registry
        handler = registry[method("default", verb)]
        calls = iter(range(1, 1000))

        def held(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == at:
                self.reached.set()
                self.release.wait(DEADLINE_S)
            return handler(*args, **kwargs)

        registry[method("default", verb)] = held


def set_up_fan_out(cast: Cast) -> None:
    """Three receivers on another node, of which the first passes buckets on."""
    for name in ("r0", "r1", "r2"):
        cast.receiver(name)
        cast.nodes[name] = "there"


def begin_and_hold(cast: Cast, pool: ThreadPoolExecutor, worker: str, verb: str, at: int) -> tuple[Future[int], Holdup]:
    """Version 2 is on its way, and stands still at `worker`."""
    sender = cast.sender()
    assert cast.send(sender, model_of(1)) == 1
    holdup = Holdup(cast, worker, verb, at)
    sent = pool.submit(cast.send, sender, model_of(2), bucket_bytes=SMALL)
    assert holdup.reached.wait(DEADLINE_S)
    return sent, holdup


@pytest.mark.parametrize(("verb", "at"), [("begin", 1), ("bucket", 3), ("commit", 1)])
def test_a_receiver_that_dies_on_the_way_gets_it_in_its_next_incarnation(
    cast: Cast, pool: ThreadPoolExecutor, verb: str, at: int
) -> None:
    first = cast.receiver("r0")
    cast.receiver("r1")
    sent, holdup = begin_and_hold(cast, pool, "r1", verb, at)
    eventually(lambda: first.version == (2 if verb == "commit" else 1))
    cast.die("r1")
    holdup.release.set()
    fresh = cast.receiver("r1", 1)
    assert sent.result(DEADLINE_S) == 2
    assert fresh.wait(2, timeout=DEADLINE_S) == 2  # also if it was left out, and catches up
    assert values_of(fresh.state_dict()) == values_of(first.state_dict()) == {2}


@one_route
def test_a_receiver_that_ends_for_good_is_named_and_the_others_have_it(cast: Cast, pool: ThreadPoolExecutor) -> None:
    first = cast.receiver("r0")
    cast.receiver("r1")
    sent, holdup = begin_and_hold(cast, pool, "r1", "bucket", 3)
    cast.die("r1", Reachability.ENDED)
    holdup.release.set()
    assert sent.result(DEADLINE_S) == 2
    assert cast.synced.left_out == {"r1": "it has ended for good (it was killed)"}
    assert first.version == 2
    with pytest.raises(WeightsError, match=r"did not reach:\n  r1: it has ended for good \(it was killed\)"):
        cast.send(cast.sender("other"), model_of(3), "r0", "r1", require=2)


@one_route
@pytest.mark.parametrize(("worker", "at"), [("r0", 3), ("r2", 2)], ids=["who passes buckets on", "a mate"])
def test_one_of_those_that_share_a_node_may_die_too(cast: Cast, pool: ThreadPoolExecutor, worker: str, at: int) -> None:
    set_up_fan_out(cast)
    sent, holdup = begin_and_hold(cast, pool, worker, "bucket", at)
    cast.die(worker)
    holdup.release.set()
    cast.receiver(worker, 1)
    assert sent.result(DEADLINE_S) == 2
    for receiver in cast.receivers.values():  # the new one may have been left out, and then catches up
        assert receiver.wait(2, timeout=DEADLINE_S) == 2
        assert values_of(receiver.state_dict()) == {2}


def opened(
    cast: Cast, version: int, value: float, sender: str = "trainer", to: str = "r0"
) -> tuple[TransferPlan, list[list[torch.Tensor]]]:
    """A version that `sender` has begun to send to a receiver, and its buckets."""
    source = OutgoingStateDict(model_of(value))
    plan = TransferPlan(
        session=f"{sender} {version}",
        version=version,
        buckets=source.cut(SMALL, 1),
        keys=source.keys,
        aliases=source.aliases,
        others=source.others,
        metadata=source.metadata,
        senders=(WorkerIncarnation(sender, 0),),
        children={},
        stays_shared=True,
        timeout_s=DEADLINE_S,
        force=False,
    )
    assert told(cast, sender, "begin", plan, to=to) == ""
    return plan, [[source.collect(entry) for entry in bucket.entries] for bucket in plan.buckets]


def told(cast: Cast, sender: str, verb: str, *args: Any, to: str = "r0") -> Any:
    return cast.buses[sender].call(to, method("default", verb), args, {}).result(DEADLINE_S)


def test_a_sender_that_dies_on_the_way_leaves_no_trace(cast: Cast) -> None:
    receiver = cast.receiver("r0")
    cast.send(cast.sender(), model_of(1))
    plan, buckets = opened(cast, 2, 2.0)
    for index, tensors in enumerate(buckets[:-1]):
        assert told(cast, "trainer", "bucket", plan.session, index, tensors) == {}
    with pytest.raises(WeightsTimeoutError, match=rf"version 2 from trainer \({len(buckets) - 1} of {len(buckets)}"):
        receiver.wait(2, timeout=missed(0.05))
    cast.die("trainer")
    with pytest.raises(WeightsTimeoutError, match="newest complete: version 1; under way: nothing"):
        receiver.wait(2, timeout=missed(0.05))
    assert receiver._service._coming == {}
    assert cast.send(cast.sender(incarnation=1), model_of(3), bucket_bytes=SMALL) == 2
    assert values_of(receiver.state_dict()) == {3}


@one_route
def test_what_was_not_committed_is_not_published(cast: Cast) -> None:
    receiver = cast.receiver("r0")
    cast.worker("trainer")
    plan, buckets = opened(cast, 1, 1.0)
    for index, tensors in enumerate(buckets):
        told(cast, "trainer", "bucket", plan.session, index, tensors)
    assert receiver.version == 0
    told(cast, "trainer", "abort", plan.session, "late")
    failure = told(cast, "trainer", "commit", plan.session)
    assert failure.text == "late"
    assert receiver.version == 0


@one_route
def test_two_senders(cast: Cast) -> None:
    receiver = cast.receiver("r0")
    cast.worker("a")
    slow, buckets = opened(cast, 1, 1.0, "a")
    sender = cast.sender("b")
    with pytest.raises(
        WeightsVersionError, match="worker r0 refuses it, because the same version is on its way from a"
    ):
        cast.send(sender, model_of(2), version=1)
    assert cast.send(sender, model_of(2), version=2) == 2
    assert told(cast, "a", "bucket", slow.session, 0, buckets[0])["r0"].kind == SUPERSEDED
    assert told(cast, "a", "commit", slow.session) is None  # as good as delivered
    assert values_of(receiver.state_dict()) == {2}


@one_route
def test_a_relay_of_buckets_is_superseded(cast: Cast, pool: ThreadPoolExecutor) -> None:
    set_up_fan_out(cast)
    sent, holdup = begin_and_hold(cast, pool, "r0", "bucket", 2)
    assert cast.send(cast.sender("other"), model_of(7), "r0", version=7) == 7
    holdup.release.set()
    assert sent.result(DEADLINE_S) == 2
    assert [values_of(receiver.state_dict()) for receiver in cast.receivers.values()] == [{7}, {2}, {2}]


@one_route
def test_a_receiver_that_hangs_is_named_when_time_is_up(cast: Cast, pool: ThreadPoolExecutor) -> None:
    first = cast.receiver("r0")
    cast.receiver("r1")
    sender = cast.sender()
    cast.send(sender, model_of(1))
    holdup = Holdup(cast, "r1", "bucket", 2)
    with pytest.raises(WeightsTimeoutError, match=r"(?s)version 2 .* did not reach:\n  r1: "):
        cast.send(sender, model_of(2), bucket_bytes=SMALL, timeout=3.0)  # enough for r0
    holdup.release.set()
    eventually(lambda: cast.receivers["r1"]._service._coming == {}, message="the rest of version 2 is still kept")
    assert values_of(cast.receivers["r1"].state_dict()) == {1}
    assert first.version in (1, 2)
    assert cast.send(sender, model_of(3)) == 3


def test_sending_behind_the_back(cast: Cast) -> None:
    receivers = [cast.receiver("r0"), cast.receiver("r1")]
    sender = cast.sender()
    model = model_of(1)
    for number in (1, 2, 3):
        fill(model, number)
        assert cast.send(sender, model, bucket_bytes=SMALL, wait=False) == number
        fill(model, -1)
    for receiver in receivers:
        assert receiver.wait(3, timeout=DEADLINE_S) == 3
        assert values_of(receiver.state_dict()) == {3}
    assert cast.send(sender, model_of(4)) == 4  # and the thread has ended well


@one_route
def test_what_went_wrong_behind_the_back_is_told_by_the_next_call(cast: Cast) -> None:
    cast.receiver("r0")
    sender = cast.sender()
    holdup = Holdup(cast, "r0", "bucket", 1)
    assert cast.send(sender, model_of(1), wait=False, timeout=missed(0.3)) == 1
    with pytest.raises(WeightsError, match=r"(?s)the previous version, sent with wait=False, failed: version 1 .*r0"):
        cast.send(sender, model_of(2))
    holdup.release.set()
    assert cast.send(sender, model_of(2)) == 2
