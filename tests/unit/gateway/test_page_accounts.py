"""The account of a job's time is one for the page and for `unified status`; `accounts.test.js` has the page's half."""

import json
from pathlib import Path

import msgspec
import pytest

from tests.support.page import changes, job
from unified.client.mirror import ClusterMirror
from unified.client.report import time_text
from unified.protocol.records import TimeSpent
from unified_gateway.page.views import JobRows

CASES = json.loads((Path(__file__).parents[2] / "browser/scripts/accounts.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_seconds_by_phase_are_those_that_the_page_counts(case: dict[str, object]) -> None:
    times, now = msgspec.convert(case["times"], TimeSpent), float(str(case["now"]))
    assert times.at(now) == case["seconds"]
    assert times.stalled_since(now) == case["stalled_since"]


def test_the_page_is_given_the_account_and_no_state_of_it_that_grows_old() -> None:
    case = CASES[0]
    told = job(submitted_at=1000.0, times=msgspec.convert(case["times"], TimeSpent))
    mirror = ClusterMirror()
    mirror.apply(msgspec.structs.replace(changes(1, is_whole=True, jobs=[told]), at=1049.0))
    row = JobRows(mirror).row("gpt-1")
    assert row is not None
    shown = json.loads(bytes(row))
    assert shown["times"] == case["times"]
    assert "seconds" not in shown
    assert time_text(told, 1240.0) == "[##..................] 12 % productive, 83 % stalled, 4 % starting"
