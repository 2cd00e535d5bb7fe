"""Versions are put together from buckets that come in any order, more than once, or never, from senders that die."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from unified.protocol.records import WorkerIncarnation
from unified.weights.transfer_plan import Bucket, TransferPlan
from unified.weights.versions import (
    MAX_OPEN,
    MAX_REMEMBERED,
    BucketVerdict,
    OfferReply,
    SessionEnd,
    SessionOutcome,
    VersionTable,
)

A, B, C = (WorkerIncarnation(name, 0) for name in "abc")


def opening(
    session: str,
    version: int,
    num_buckets: int = 2,
    sender: WorkerIncarnation = A,
    senders: tuple[WorkerIncarnation, ...] = (),
    expires_at: float = 100.0,
    **fields: Any,
) -> TransferPlan:
    """A plan that lasts until `expires_at`, which is its `timeout_s`, as it is offered at time 0."""
    rest: dict[str, Any] = {"keys": (), "aliases": {}, "others": {}, "metadata": None, "children": {}}
    rest |= {"stays_shared": True, "timeout_s": expires_at, "force": False, **fields}
    return TransferPlan(
        session=session, version=version, buckets=(Bucket((), 0),) * num_buckets, senders=senders or (sender,), **rest
    )


def begin(assembly: VersionTable, now: float, plan: TransferPlan) -> OfferReply:
    return assembly.begin(now, plan, expires_at=plan.timeout_s)


def begun(assembly: VersionTable, *openings: TransferPlan) -> VersionTable:
    for each in openings:
        assert begin(assembly, 0.0, each).refusal == ""
    return assembly


def store(assembly: VersionTable, session: str, *indices: int) -> list[SessionEnd]:
    ended: list[SessionEnd] = []
    for index in indices:
        assert assembly.take(session, index) is BucketVerdict.STORE
        ended += assembly.stored(session, index)
    return ended


def published(session: str, version: int) -> SessionEnd:
    return SessionEnd(session, SessionOutcome.PUBLISHED, version)


def test_a_version_is_published_when_whole_and_committed() -> None:
    assembly = begun(VersionTable(), opening("s", 3))
    assert store(assembly, "s", 1, 0) == []
    assert assembly.version == 0
    assert assembly.outcome("s") is None
    assert assembly.commit("s") == [published("s", 3)]
    assert assembly.version == 3
    assert assembly.outcome("s") == published("s", 3)


def test_the_commit_may_come_before_the_last_bucket() -> None:
    assembly = begun(VersionTable(), opening("s", 3))
    assert store(assembly, "s", 1) == []
    assert assembly.commit("s") == []
    assert store(assembly, "s", 0) == [published("s", 3)]


def test_a_bucket_is_wanted_once() -> None:
    assembly = begun(VersionTable(), opening("s", 1))
    assert assembly.take("s", 0) is BucketVerdict.STORE
    assert assembly.take("s", 0) is BucketVerdict.DUPLICATE
    assert assembly.stored("s", 1) == []  # never taken
    assert [assembly.take("s", index) for index in (-1, 2)] == [BucketVerdict.UNWANTED] * 2
    assert assembly.take("other", 0) is BucketVerdict.UNWANTED


def test_an_opening_said_twice_changes_nothing() -> None:
    assembly = begun(VersionTable(), opening("s", 1))
    store(assembly, "s", 0)
    begun(assembly, opening("s", 1))
    assert assembly.take("s", 0) is BucketVerdict.DUPLICATE


def test_versions_go_up_unless_forced() -> None:
    assembly = begun(VersionTable(), opening("s7", 7, 0))
    assembly.commit("s7")
    assert begin(assembly, 0, opening("s6", 6)).refusal == "version 7 is there already, and versions must increase"
    assert begin(assembly, 0, opening("s0", 0)).refusal == "versions are numbered from 1"
    begun(assembly, opening("again", 7, 0))
    assert assembly.commit("again") == [published("again", 7)]
    begun(assembly, opening("back", 3, 0, force=True))
    assert assembly.commit("back") == [published("back", 3)]
    assert assembly.version == 3


def test_two_senders_the_newer_version_overtakes() -> None:
    assembly = begun(VersionTable(), opening("s1", 1, sender=A), opening("s2", 2, sender=B))
    store(assembly, "s1", 0)
    assembly.commit("s2")
    ended = store(assembly, "s2", 0, 1)
    assert ended == [published("s2", 2), SessionEnd("s1", SessionOutcome.SUPERSEDED, 1, "version 2 was complete first")]
    assert assembly.take("s1", 1) is BucketVerdict.UNWANTED
    assert assembly.outcome("s1") == ended[1]


def test_two_senders_in_order_are_both_published() -> None:
    assembly = begun(VersionTable(), opening("s1", 1, 0, sender=A), opening("s2", 2, 0, sender=B))
    assert assembly.commit("s1") == [published("s1", 1)]  # a version without tensors too
    assert assembly.commit("s2") == [published("s2", 2)]


def test_the_same_version_from_two_senders_is_refused() -> None:
    assembly = begun(VersionTable(), opening("s1", 1, sender=A))
    assert begin(assembly, 0, opening("s2", 1, sender=B)).refusal == "the same version is on its way from a"


def test_a_sender_that_begins_anew_drops_what_it_had_begun() -> None:
    assembly = begun(VersionTable(), opening("s1", 1))
    answer = begin(assembly, 0, opening("s2", 1, sender=WorkerIncarnation("a", 1)))
    assert answer.refusal == ""
    assert answer.ended == [SessionEnd("s1", SessionOutcome.DROPPED, 1, "a began version 1 instead")]


def test_a_members_transfer_gives_way_to_a_sync_of_the_same_version() -> None:
    table = begun(VersionTable(), opening("m", 1, sender=A, is_catch_up=True), opening("s1", 1, sender=B))
    assert table.outcome("m") == SessionEnd("m", SessionOutcome.DROPPED, 1, "b began version 1 instead")
    refusal = begin(table, 0, opening("m", 1, sender=A, is_catch_up=True))
    assert refusal.refusal == "this attempt is over: b began version 1 instead"
    assert (
        begin(table, 0, opening("n", 1, sender=A, is_catch_up=True)).refusal == "the same version is on its way from b"
    )


def test_a_members_transfer_takes_no_place_of_a_sync() -> None:
    table = begun(VersionTable(), opening("m", 1, 0, sender=C, is_catch_up=True))
    begun(table, opening("s2", 2, sender=A), opening("s3", 3, sender=B))
    assert table.commit("m") == [published("m", 1)]
    begun(table, opening("n", 1, sender=C, is_catch_up=True))
    assert table.check() == []


def test_so_many_at_a_time() -> None:
    assembly = begun(VersionTable(), opening("s1", 1, sender=A), opening("s2", 2, sender=B))
    assert f"no more than {MAX_OPEN} are received at a time" in begin(assembly, 0, opening("s3", 3, sender=C)).refusal
    assert begin(assembly, 200.0, opening("s3", 3, sender=C, expires_at=300)).refusal == ""  # theirs had expired
    assert assembly.open_sessions == ["s3"]


def test_death_of_any_sender_drops_what_it_was_to_send() -> None:
    assembly = begun(VersionTable(), opening("s", 1, senders=(A, B)))
    store(assembly, "s", 0)
    (ended,) = assembly.incarnation_died(B, "killed")
    assert ended == SessionEnd("s", SessionOutcome.DROPPED, 1, "b, which was sending it, died: killed")
    assert assembly.incarnation_died(B, "killed") == []
    assert (
        begin(assembly, 0, opening("late", 1, senders=(B,))).refusal
        == "b should send it, but its incarnation 0 is dead"
    )
    begun(assembly, opening("next", 1, sender=WorkerIncarnation("b", 1)))


def test_death_after_the_last_bucket_takes_nothing_back() -> None:
    assembly = begun(VersionTable(), opening("s", 1, 0))
    assembly.commit("s")
    assert assembly.incarnation_died(A, "killed") == []
    assert assembly.version == 1


def test_time_is_up() -> None:
    assembly = begun(VersionTable(), opening("s", 1, expires_at=5.0))
    assert assembly.expire(4.9) == []
    assert assembly.expire(5.0) == [SessionEnd("s", SessionOutcome.DROPPED, 1, "its time was up")]


def test_abort_ends_what_is_open_and_nothing_else() -> None:
    assembly = begun(VersionTable(), opening("s", 1, 0))
    assembly.commit("s")
    assert assembly.abort("s", "late") == []
    begun(assembly, opening("t", 2))
    assert assembly.abort("t", "so it was said") == [SessionEnd("t", SessionOutcome.DROPPED, 2, "so it was said")]
    assert assembly.abort("t", "again") == []
    assert begin(assembly, 0, opening("t", 2)).refusal == "this attempt is over: so it was said"


def test_progress_in_words() -> None:
    assembly = begun(VersionTable(), opening("s", 4, 3))
    assert assembly.progress() == "version 4 from a (0 of 3 buckets)"
    store(assembly, "s", 2)
    assert assembly.progress() == "version 4 from a (1 of 3 buckets)"


def test_ends_are_remembered_for_a_while() -> None:
    assembly = VersionTable()
    for version in range(1, MAX_REMEMBERED + 2):
        begun(assembly, opening(f"s{version}", version, 0))
        assembly.commit(f"s{version}")
    unknown = assembly.outcome("s1")
    assert unknown is not None
    assert unknown.how is SessionOutcome.UNKNOWN
    assert assembly.outcome("s2") == published("s2", 2)


class Senders(RuleBasedStateMachine):
    """Senders that do anything in any order, against what a receiver promises."""

    def __init__(self) -> None:
        super().__init__()
        self.assembly = VersionTable()
        self.now = 0.0
        self.openings: dict[str, TransferPlan] = {}
        self.taken: set[tuple[str, int]] = set()
        self.stored: set[tuple[str, int]] = set()
        self.committed: set[str] = set()
        self.ended: dict[str, SessionEnd] = {}
        self.incarnations = dict.fromkeys("abc", 0)

    def took(self, ended: list[SessionEnd]) -> None:
        """What the shell is told: every session ends once, and a version is published only if it is whole."""
        before = self.version
        for each in ended:
            assert each.session in self.openings
            assert each.session not in self.ended
            self.ended[each.session] = each
            opening = self.openings[each.session]
            assert each.version == opening.version
            if each.how is SessionOutcome.PUBLISHED:
                assert each.session in self.committed
                assert {index for session, index in self.stored if session == each.session} == set(
                    range(len(opening.buckets))
                )
                assert each.version >= before or opening.force
                assert all(
                    self.incarnations[incarnation.worker] <= incarnation.number for incarnation in opening.senders
                )
                assert self.assembly.version == each.version
            elif each.how is SessionOutcome.SUPERSEDED:
                assert each.version < self.assembly.version
        if not any(each.how is SessionOutcome.PUBLISHED for each in ended):
            assert self.assembly.version == before
        self.version = self.assembly.version

    version = 0

    @rule(
        senders=st.lists(st.sampled_from("abc"), min_size=1, max_size=2, unique=True),
        version=st.integers(0, 6),
        num_buckets=st.integers(0, 3),
        force=st.booleans(),
        is_catch_up=st.booleans(),
        lasts=st.integers(1, 9),
    )
    def begin(
        self, senders: list[str], version: int, num_buckets: int, force: bool, is_catch_up: bool, lasts: int
    ) -> None:
        new = opening(
            f"s{len(self.openings)}",
            version,
            num_buckets,
            senders=tuple(WorkerIncarnation(name, self.incarnations[name]) for name in senders),
            force=force,
            is_catch_up=is_catch_up,
            expires_at=self.now + lasts,
        )
        self.openings[new.session] = new
        answer = begin(self.assembly, self.now, new)
        self.took(answer.ended)
        assert (new.session in self.assembly.open_sessions) == (answer.refusal == "")
        if version < 1 or (version < self.version and not force):
            assert answer.refusal
        if answer.refusal:
            del self.openings[new.session]
            self.openings[f"refused {new.session}"] = new

    @precondition(lambda self: self.openings)
    @rule(data=st.data(), index=st.integers(-1, 3))
    def bucket(self, data: st.DataObject, index: int) -> None:
        session = data.draw(st.sampled_from(sorted(self.openings)))
        take = self.assembly.take(session, index)
        is_open = session in self.assembly.open_sessions
        if not is_open or not 0 <= index < len(self.openings[session].buckets):
            assert take is BucketVerdict.UNWANTED
        else:
            assert take is (BucketVerdict.DUPLICATE if (session, index) in self.taken else BucketVerdict.STORE)
            self.taken.add((session, index))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        session, index = data.draw(st.sampled_from(sorted(self.taken)))
        self.stored.add((session, index))
        self.took(self.assembly.stored(session, index))

    @precondition(lambda self: self.openings)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.openings)))
        self.committed.add(session)
        self.took(self.assembly.commit(session))

    @precondition(lambda self: self.openings)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.openings)))
        self.took(self.assembly.abort(session, "aborted"))
        assert session not in self.assembly.open_sessions

    @rule(name=st.sampled_from("abc"))
    def die(self, name: str) -> None:
        incarnation = WorkerIncarnation(name, self.incarnations[name])
        self.incarnations[name] += 1
        self.took(self.assembly.incarnation_died(incarnation, "killed"))
        for session in self.assembly.open_sessions:
            assert incarnation not in self.openings[session].senders

    @rule(seconds=st.integers(1, 5))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.took(self.assembly.expire(self.now))
        assert all(self.openings[session].timeout_s > self.now for session in self.assembly.open_sessions)

    @invariant()
    def nothing_is_broken(self) -> None:
        assert self.assembly.check() == []

    @invariant()
    def every_session_is_open_or_has_ended(self) -> None:
        for session in self.openings:
            outcome = self.assembly.outcome(session)
            if session.startswith("refused"):
                assert outcome is not None
                assert outcome.how is SessionOutcome.UNKNOWN
            elif session in self.ended:
                assert outcome == self.ended[session] or len(self.ended) > MAX_REMEMBERED
            else:
                assert outcome is None

    @invariant()
    def no_complete_version_is_left_unpublished(self) -> None:
        for session in self.assembly.open_sessions:
            stored = {index for each, index in self.stored if each == session}
            assert session not in self.committed or len(stored) < len(self.openings[session].buckets)


TestSenders = Senders.TestCase
