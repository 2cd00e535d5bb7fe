"""What is looked at before a message is believed."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified.bus.calls.dispatcher import MAX_OUTSIDERS, Admission, SeenCalls, TooOldError
from unified.bus.identity import BusIdentity
from unified.bus.transport.connections import Tombstones
from unified.errors import ProtocolError, VersionMismatchError
from unified.protocol.envelope import BUS_VERSION, OUTSIDE, Envelope, Kind, encode_envelope

ME = BusIdentity(job="j", worker="w", incarnation=0, node="n", host="h", inbox="b")


def call(number: int, count: int, sender: str = "a", worker: str = "w") -> Envelope:
    return Envelope(BUS_VERSION, Kind.CALL, number, sender, worker, "b", count=count)


@pytest.fixture
def admission() -> Admission:
    return Admission(ME, Tombstones())


def test_each_call_is_new_once_in_whatever_order_they_come() -> None:
    seen = SeenCalls()
    ids = list(range(1, 20_000, 3))
    random.Random(1).shuffle(ids)
    assert all(seen.is_new(each) for each in ids)
    assert not any(seen.is_new(each) for each in ids)
    assert seen.is_new(2)


def test_memory_of_one_sender_does_not_grow_with_its_calls() -> None:
    seen = SeenCalls()
    for i in range(0, 10_000_000, 97):
        assert seen.is_new(i)
    assert len(seen._blocks) <= SeenCalls.KEPT // SeenCalls._BITS + 1
    assert not seen.is_new(0)
    assert not seen.is_new(i)
    assert seen.is_new(i - SeenCalls.KEPT + 1 + SeenCalls._BITS)


def test_gap_of_any_size_is_one_step() -> None:
    seen = SeenCalls()
    assert seen.is_new(5)
    assert seen.is_new(2**63)
    assert not seen.is_new(5)
    assert seen.is_new(2**63 - 1)


def test_repetitions_are_refused_and_logged_once(admission: Admission, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(1000):
        envelope = call(i, i)
        admission.check_new(envelope)
        with pytest.raises(ProtocolError, match=rf"call {i} of worker w came a second time") as caught:
            admission.check_new(envelope)
        admission.reject(caught.value)
    assert admission.num_rejected == 1000
    assert len(caplog.records) == 1
    admission.forget("a")
    assert not admission._seen


@given(st.permutations(range(1, 40)), st.lists(st.integers(0, 38)))
def test_calls_that_overtake_one_another_are_new_once(ids: list[int], again: list[int]) -> None:
    seen = SeenCalls()
    assert all(seen.is_new(each) for each in ids)
    assert not any(seen.is_new(ids[each]) for each in again)


def test_ids_are_forgotten_without_being_believed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SeenCalls, "KEPT", 10)
    monkeypatch.setattr(SeenCalls, "_BITS", 2)
    seen = SeenCalls()
    assert all(seen.is_new(each) for each in range(1, 500))
    assert len(seen._blocks) <= 7
    assert not any(seen.is_new(each) for each in range(1, 500))
    assert seen.is_new(501)
    assert seen.is_new(500)


def test_what_is_known_to_have_come_is_told_from_what_is_only_old(admission: Admission) -> None:
    for place in (1, 2 * SeenCalls.KEPT, 2 * SeenCalls.KEPT - 1):
        admission.check_new(call(7, place))
    with pytest.raises(ProtocolError, match="call 7 of worker w came a second time") as caught:
        admission.check_new(call(7, 2 * SeenCalls.KEPT))
    assert not isinstance(caught.value, TooOldError)
    for place in (1, 2):  # of which one came
        with pytest.raises(TooOldError, match="call 7 of worker w came behind 65536 later ones"):
            admission.check_new(call(7, place))


def test_what_is_for_somebody_else_is_refused_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    admission = Admission(ME._replace(job="job-1", inbox="me", worker="b"), Tombstones())
    right = Envelope(BUS_VERSION, Kind.CALL, 1, "a", "a_1-0_1-0", "me", "m", job="job-1")
    assert admission.read(encode_envelope(right)) == right
    admission.check_new(right)
    with pytest.raises(ProtocolError, match="came a second time"):
        admission.check_new(right)
    with pytest.raises(ProtocolError, match="of job 'job-2', but this is 'job-1'"):
        admission.read(encode_envelope(Envelope(BUS_VERSION, Kind.CALL, 2, "a", "a", "me", "m", job="job-2")))
    with pytest.raises(ProtocolError, match="this incarnation has another inbox"):
        admission.read(encode_envelope(Envelope(BUS_VERSION, Kind.CALL, 3, "a", "a", "you", "m", job="job-1")))
    newer = encode_envelope(Envelope(BUS_VERSION + 1, Kind.CALL, 3, "a", "a", "me", "m", job="job-1"))
    for _ in range(3):
        with pytest.raises(VersionMismatchError) as raised:
            admission.read(newer)
        admission.reject(raised.value)
    assert admission.num_rejected == 3
    assert len(caplog.records) == 1


def test_calls_of_the_dead_are_refused_however_old() -> None:
    tombstones = Tombstones()
    admission = Admission(ME, tombstones)
    admission.check_new(call(1, 1))
    tombstones.add("a")
    admission.forget("a")
    for number in (1, 2):
        with pytest.raises(ProtocolError, match=f"call {number} of an incarnation of worker w that is over"):
            admission.check_new(call(number, number))
    assert not admission._seen
    admission.check_new(call(1, 1, "a2"))


def test_only_so_many_of_the_dead_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tombstones, "KEPT", 3)
    tombstones = Tombstones()
    for each in "abcbd":
        tombstones.add(each)
    assert [each in tombstones for each in "abcd"] == [False, True, True, True]


def test_each_kind_of_refusal_is_logged_once(admission: Admission, caplog: pytest.LogCaptureFixture) -> None:
    admission.check_new(call(1, 2 * SeenCalls.KEPT))
    for _ in range(3):
        for place in (1, 2 * SeenCalls.KEPT):  # one too old, and one a second time: both begin with the same word
            with pytest.raises(ProtocolError) as caught:
                admission.check_new(call(1, place))
            admission.reject(caught.value)
        admission.reject(ProtocolError("never raised"))
    assert len(caplog.records) == 3
    assert admission.num_rejected == 9


def test_callers_from_outside_the_job_come_and_go_without_end(admission: Admission) -> None:
    gone: list[str] = []
    admission.on_outsider_gone = gone.append
    for number in range(MAX_OUTSIDERS + 3):
        admission.check_new(call(1, 1, f"o{number}", f"{OUTSIDE}me@host-{number}"))
        admission.check_new(call(1, 1, f"w{number}"))
    assert gone == ["o0", "o1", "o2"]
    assert len(admission._seen) == MAX_OUTSIDERS + MAX_OUTSIDERS + 3  # workers are forgotten when they end
