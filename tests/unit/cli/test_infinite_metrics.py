"""Infinity and NaN as metrics: apart in the series, in each form of `unified metrics`, in JSON and in trackers."""

import csv
import io
import json
import math
import threading
from typing import Any

import msgspec
import pytest

from tests.support.fake_master import worker_status
from unified.cli.metrics import _csv_writer, _print_line, newest_lines
from unified.cli.show import print_json
from unified.client.reports import KeptReports
from unified.protocol.client_master import JobStatus
from unified.protocol.records import Progress, Stage, WorkerReport
from unified.protocol.worker_agent import Reported
from unified.trackers.points import points_of
from unified.worker.progress import Reporter

GIVEN: dict[str, float | int | str] = {
    "up": math.inf,
    "down": -math.inf,
    "none": math.nan,
    "loss": 0.5,
    "count": 3,
    "phase": "fit",
    "word": "inf",
}
IN_JSON = {"up": "Infinity", "down": "-Infinity", "none": None, "loss": 0.5, "count": 3, "phase": "fit", "word": "inf"}


@pytest.fixture
def report() -> WorkerReport:
    """A report as it is read from the series that its agent wrote."""
    sent: list[Reported] = []
    came = threading.Event()

    def send(word: Reported) -> None:
        sent.append(word)
        came.set()

    reporter = Reporter(send, interval_s=0)
    reporter.report(1, None, GIVEN)
    assert came.wait(100)
    [point] = msgspec.msgpack.decode(msgspec.msgpack.encode(sent[0]), type=Reported).points
    assert sent[0].progress.metrics["up"] == math.inf
    return msgspec.json.decode(msgspec.json.encode(point), type=WorkerReport)


def test_the_table_and_the_lines_say_which(report: WorkerReport, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line.split()[1:5] for line in newest_lines({"w-0": KeptReports([report], [])})[1:]]
    last = ["inf", "-inf", "nan", "0.5", "3", "fit", "inf"]
    assert rows == [[name, "1", value, "0.5" if name == "loss" else rows[at][3]] for at, (name, value) in enumerate(
        zip(GIVEN, last, strict=True))]  # fmt: skip
    _print_line("w-0", report)
    assert "up inf  down -inf  none nan  loss 0.5  count 3" in capsys.readouterr().out


def test_csv_has_the_same_values(report: WorkerReport, capsys: pytest.CaptureFixture[str]) -> None:
    _csv_writer()("w-0", report)
    rows = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert [(row["name"], row["value"]) for row in rows] == [(name, str(value)) for name, value in GIVEN.items()]


def test_json_has_texts_for_infinity_and_null_for_nan(report: WorkerReport, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    print_json({"w-0": {**KeptReports([report], [])._asdict(), "num_thinned": 0}})
    shown = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert shown["w-0"]["reports"][0]["metrics"] == IN_JSON
    worker = worker_status(0, progress=Progress(step=1, metrics=GIVEN))
    print_json(JobStatus(job_id="j-1", name="j", stage=Stage.RUNNING, exit_code=None, workers=[worker]))
    shown = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert shown["workers"][0]["progress"]["metrics"] == IN_JSON


def test_trackers_get_numbers(report: WorkerReport) -> None:
    [point] = points_of([report])
    assert repr(point.values) == repr(GIVEN)
