"""The newest time in saved records, from which a new term goes on."""

from unified.protocol.records import EventRecord, Phase, TimeSpent
from unified_master.core.accounting import Account
from unified_master.core.restore import Record, newest_time
from unified_master.core.state import JobRecord


def job(since: float) -> Record:
    spent = TimeSpent(phase=Phase.PRODUCTIVE, since=since)
    record = JobRecord(job_id="j-1", sequence=1, submitted_at=50.0, account=Account(spent=spent))
    return ("job", "j-1", record.saved())


def event(at: float) -> EventRecord:
    return EventRecord(at=at, event="x", reason="y")


def test_events_and_jobs_have_times() -> None:
    assert newest_time([], []) == 0.0
    assert newest_time([job(70.0)], [event(60.0), event(40.0)]) == 70.0
    assert newest_time([job(70.0), job(60.0)], [event(80.0), event(40.0)]) == 80.0


def test_other_and_unreadable_records_have_none() -> None:
    assert newest_time([("node", "n", job(70.0)[2]), ("job", "k", b"\xc1"), ("job", "l", b"\x80")], [event(5.0)]) == 5.0
