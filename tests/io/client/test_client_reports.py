"""Reports of a worker over all its incarnations, read backwards from files that rotate, through a master."""

from pathlib import Path

import pytest
from msgspec import json, structs

from tests.support.fake_master import FakeMaster
from unified.client import reports
from unified.client.connection import MasterConnection
from unified.client.reports import read_reports
from unified.errors import RefusedError
from unified.protocol.client_master import ClientToMaster, LogChunk, MasterAnswer, ReadLog, Refused
from unified.protocol.records import WorkerReport
from unified_agent.logs.logfile import LogFile, read_slice
from unified_agent.logs.series import SeriesFile

MAX_FILES = 3


def point(step: int, incarnation: int = 0, **metrics: float | int | str | None) -> WorkerReport:
    return WorkerReport(
        at=100.0 + step,
        step=step,
        total=None,
        metrics=metrics or {"loss": 0.5},
        incarnation=incarnation,
        number=step,
    )


class Incarnations:
    """Files of a worker's incarnations, as its agent writes them, and a master that reads them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refused: dict[int, Refused] = {}
        self.num_reads = 0

    def write(self, incarnation: int, steps: range, *, max_bytes: int = 1 << 20, rest: bytes = b"") -> None:
        file = LogFile(self.folder / f"{incarnation}.metrics.jsonl", max_bytes, MAX_FILES)
        for step in steps:
            file.write(json.encode(point(step, incarnation)) + b"\n")
        file.write(rest)
        file.close()

    def respond(self, request: ClientToMaster) -> MasterAnswer:
        assert isinstance(request, ReadLog)
        assert (request.job, request.worker, request.stream) == ("job", "w-0", "metrics")
        assert request.incarnation is not None
        self.num_reads += 1
        if (refused := self.refused.get(request.incarnation)) is not None:
            return refused
        path = self.folder / f"{request.incarnation}.metrics.jsonl"
        part = read_slice(path, request.offset, request.max_bytes, MAX_FILES)
        return LogChunk(
            worker="w-0",
            incarnation=request.incarnation,
            data=part.data,
            offset=part.offset,
            next_offset=part.offset + len(part.data),
            size=part.size,
            is_final=False,
        )


@pytest.fixture
def incarnations(tmp_path: Path, fake_master: FakeMaster) -> Incarnations:
    incarnations = Incarnations(tmp_path)
    fake_master.respond = incarnations.respond
    return incarnations


@pytest.fixture
def connection(fake_master: FakeMaster) -> MasterConnection:
    return MasterConnection(fake_master.address)


@pytest.mark.parametrize("block", [7, 64, 1000, 1 << 18])
@pytest.mark.parametrize("max_bytes", [333, 1 << 20])
def test_reports_of_all_incarnations_in_order_whatever_the_blocks(
    block: int,
    max_bytes: int,
    incarnations: Incarnations,
    connection: MasterConnection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reports, "BLOCK_BYTES", block)
    for incarnation in range(3):
        steps = range(incarnation * 5, incarnation * 5 + 5)
        incarnations.write(incarnation, steps, max_bytes=max_bytes, rest=b'{"at": 999, "st')
    with connection:
        found = read_reports(connection, "job", "w-0", 2)
        assert [(report.incarnation, report.step) for report in found.reports] == [(n // 5, n) for n in range(15)]
        assert found.reports[0] == point(0)
        assert found.missing == []
        some = read_reports(connection, "job", "w-0", 2, limit=7).reports
        assert [report.step for report in some] == list(range(8, 15))
        later = read_reports(connection, "job", "w-0", 2, since=103.0).reports
        assert [report.step for report in later] == list(range(4, 15))
        assert read_reports(connection, "job", "w-0", -1).reports == []


@pytest.mark.parametrize("block", [10, 300, 1 << 18])
def test_what_was_rotated_away_is_not_missed(
    block: int, incarnations: Incarnations, connection: MasterConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "BLOCK_BYTES", block)
    incarnations.write(0, range(1000), max_bytes=500)
    with connection:
        steps = [report.step for report in read_reports(connection, "job", "w-0", 0).reports]
    assert steps == list(range(1000 - len(steps), 1000))
    assert 10 < len(steps) < 30


@pytest.mark.parametrize("block", [10, 300, 1 << 18])
def test_a_series_whose_old_points_are_thinned_is_read_from_the_first_on(
    block: int, incarnations: Incarnations, connection: MasterConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "BLOCK_BYTES", block)
    file = SeriesFile(incarnations.folder / "0.metrics.jsonl", 1000, MAX_FILES)
    for step in range(500):
        file.write_lines(json.encode(point(step)) + b"\n")
    file.close()
    with connection:
        found = read_reports(connection, "job", "w-0", 0)
    assert (found.reports[0], found.reports[-1]) == (point(0), point(499))
    assert found.num_thinned == 500 - len(found.reports) > 400


def test_parts_of_a_point_are_put_together_and_a_line_that_came_twice_changes_nothing(
    incarnations: Incarnations, connection: MasterConnection
) -> None:
    later = structs.replace(point(2, eval_loss=0.25), at=200.0)
    parts = [point(0), point(0), point(2, loss=0.5, lr=1.0), point(2, loss=0.75), later, later]
    incarnations.write(0, range(0), rest=b"".join(json.encode(part) + b"\n" for part in parts))
    incarnations.write(1, range(7, 8))
    with connection:
        found = read_reports(connection, "job", "w-0", 1)
        whole = structs.replace(later, metrics={"loss": 0.75, "lr": 1.0, "eval_loss": 0.25})
        assert found.reports == [point(0), whole, point(7, 1)]
        assert found.num_thinned == 1, "of incarnation 0 number 1 is missing"
        assert read_reports(connection, "job", "w-0", 0, since=150.0).reports == [whole]


def test_the_newest_reports_of_a_long_file_cost_one_request(
    incarnations: Incarnations, connection: MasterConnection
) -> None:
    incarnations.write(0, range(20_000))
    with connection:
        assert [report.step for report in read_reports(connection, "job", "w-0", 0, limit=2).reports] == [19998, 19999]
    assert incarnations.num_reads == 1


def test_incarnations_that_cannot_be_read_are_named(incarnations: Incarnations, connection: MasterConnection) -> None:
    for incarnation in (1, 3):
        incarnations.write(incarnation, range(incarnation, incarnation + 1))
    incarnations.refused = {
        2: Refused(code="unavailable", reason="node n2 is away"),
        0: Refused(code="not-found", reason="nothing is known of incarnation 0"),
    }
    with connection:
        found = read_reports(connection, "job", "w-0", 3)
        assert [report.step for report in found.reports] == [1, 3]
        assert found.missing == ["node n2 is away", "nothing is known of incarnation 0"]
        incarnations.refused[3] = Refused(code="not-found", reason="no job")
        with pytest.raises(RefusedError, match="no job"):
            read_reports(connection, "job", "w-0", 3)
