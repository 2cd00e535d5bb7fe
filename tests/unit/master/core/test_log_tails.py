"""Ends of workers' output that the master keeps: bounded for each stream and in all, with gaps that are told."""

from typing import Any

import pytest
from msgspec import structs

from tests.support.master import simple
from tests.support.sim import sim_agent
from tests.support.sim.sim_agent import SimAgent, resources
from tests.support.sim.world import World
from unified.job.spec import JobSpec
from unified.protocol.agent_master import LogRead, ReadAgentLog
from unified.protocol.client_master import LogChunk, ReadLog, Refused, StopJob, SubmitJob
from unified.protocol.records import JobWorkerIncarnation, Stage
from unified_master.core import log_tails
from unified_master.core.log_tails import STREAM_BYTES, KeptTails, TailPart

INCARNATION = JobWorkerIncarnation("job-1", "w_1-0_1-0", 0)


def test_bytes_that_follow_each_other_are_one_part() -> None:
    kept = KeptTails()
    assert kept.read(INCARNATION, "out", 0, 100) is None
    kept.add(INCARNATION, "out", 100, b"one ")
    kept.add(INCARNATION, "out", 104, b"two")
    kept.add(INCARNATION, "out", 200, b"three")
    assert kept.read(INCARNATION, "out", 0, 100) == TailPart(b"one two", 100, 205)
    assert kept.read(INCARNATION, "out", 104, 2) == TailPart(b"tw", 104, 205)
    assert kept.read(INCARNATION, "out", 107, 100) == TailPart(b"three", 200, 205)
    assert kept.read(INCARNATION, "out", -3, 100) == TailPart(b"ree", 202, 205)
    assert kept.read(INCARNATION, "out", 205, 100) == TailPart(b"", 205, 205)
    assert kept.read(INCARNATION, "out", 5000, 100) == TailPart(b"", 5000, 5000)  # nobody is moved backwards
    kept.add(INCARNATION, "out", 0, b"a new beginning")
    assert kept.read(INCARNATION, "out", 0, 100) == TailPart(b"a new beginning", 0, 15)
    kept.forget("job-1")
    assert kept.read(INCARNATION, "out", 0, 100) is None


def test_of_a_stream_the_newest_bytes_are_kept() -> None:
    kept = KeptTails()
    for number in range(100):
        kept.add(INCARNATION, "err", number * 1000, b"x" * (1000 - number % 3))  # some follow each other, some do not
    part = kept.read(INCARNATION, "err", 0, STREAM_BYTES)
    assert part is not None
    assert part.size == 99_000 + 1000 - 99 % 3
    offset, total = part.offset, 0
    while (found := kept.read(INCARNATION, "err", offset, STREAM_BYTES)) and found.data:
        offset, total = found.offset + len(found.data), total + len(found.data)
    assert STREAM_BYTES - 1000 < total <= STREAM_BYTES


def test_of_all_streams_those_are_dropped_that_were_not_added_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_tails, "TOTAL_BYTES", 3000)
    kept = KeptTails()
    incarnations = [INCARNATION._replace(number=number) for number in range(4)]
    for incarnation in [*incarnations[:3], incarnations[0], incarnations[3]]:
        kept.add(incarnation, "out", 0, b"x" * 1000)
    assert [kept.read(incarnation, "out", 0, 1) is not None for incarnation in incarnations] == [
        True,
        False,
        True,
        True,
    ]


@pytest.fixture
def world() -> World:
    """A running job, of whose output the master has bytes 600 to 1000."""
    world = World()
    world.add(SimAgent("n1", resources()))
    world.run(0.1)
    world.request(SubmitJob(spec=JobSpec(name="job", roles=[simple("a", 1)])))
    world.until_stage("job", Stage.RUNNING)
    world.core.cluster.tails.add(JobWorkerIncarnation("job-1", "a_1-0_1-0", 0), "err", 600, b"x" * 400)
    return world


@pytest.mark.parametrize(("is_missing", "kind"), [(True, LogChunk), (False, Refused)])
def test_only_a_file_that_is_missing_is_stood_in_for(
    world: World, is_missing: bool, kind: type[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that takes too long, or a node without descriptors, has the log."""

    def log_of(order: ReadAgentLog, node: str, incarnation: str) -> LogRead:
        place: dict[str, Any] = {"data": b"", "offset": 0, "next_offset": 0, "size": 0}
        return LogRead(node=node, incarnation=incarnation, **place, error="why", is_missing=is_missing)

    monkeypatch.setattr(sim_agent, "log_of", log_of)
    for grep, code in (("x", "not-found"), ("", "unavailable")):  # a search is not to be tried again
        answer = world.request(ReadLog(job="job", worker="a-0", stream="err", grep=grep))
        assert isinstance(answer, kind)
        assert ("node n1 has lost the file" if is_missing else "cannot be read: why") in str(answer)
        assert is_missing or code in str(answer)


def test_the_archive_that_has_the_whole_is_named_by_the_folder_of_the_job(world: World) -> None:
    node = world.core.cluster.nodes["n1"]
    node.info = structs.replace(node.info, log_archive="s3://logs/unified/")
    world.cut.add("n1")
    world.run(30)
    seen = world.get(LogChunk, ReadLog(job="job", worker="a-0", stream="err"))
    assert seen.note.endswith("the whole is in s3://logs/unified/job-1/a_1-0_1-0")


def test_who_wants_all_waits_for_the_node_while_the_job_runs(world: World) -> None:
    """A node that is away for a moment comes back with the log."""
    world.cut.add("n1")
    world.run(30)
    assert world.get(Refused, ReadLog(job="job", worker="a-0", stream="err", keep=True)).code == "unavailable"
    seen = world.get(LogChunk, ReadLog(job="job", worker="a-0", stream="err"))
    assert (seen.offset, seen.next_offset, seen.is_final) == (600, 1000, False)
    further = world.get(LogChunk, ReadLog(job="job", worker="a-0", stream="err", offset=5000))
    assert (further.data, further.next_offset, further.is_final) == (b"", 5000, False)
    world.request(StopJob(job="job", force=True))
    world.until_stage("job", Stage.STOPPED)
    last = world.get(LogChunk, ReadLog(job="job", worker="a-0", stream="err", keep=True))
    assert (last.offset, last.next_offset, last.is_final) == (600, 1000, True)
