"""A save that waits for its store is reported, until the store goes on."""

import queue
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from unified.training import run as training_run
from unified.training.run import TrainingRun

WITHIN_S = 100.0


def test_a_save_that_waits_for_its_store_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_run, "LOOK_EVERY_S", 0.01)
    reports: queue.Queue[dict[str, Any]] = queue.Queue()
    lines: list[str] = []
    store = SimpleNamespace(moved_at=0.0)
    run = SimpleNamespace(checkpoints=store, report=lambda **metrics: reports.put(metrics), log=lines.append)
    with TrainingRun.saving(cast(TrainingRun, run), 12):
        store.moved_at = time.monotonic() - 23
        first = reports.get(timeout=WITHIN_S)
        assert first["save_step"] == 12
        assert first["save_wait_s"] >= 23
        assert reports.get(timeout=WITHIN_S)["save_wait_s"] >= first["save_wait_s"]
        store.moved_at = time.monotonic() + 3600
        while reports.get(timeout=WITHIN_S)["save_wait_s"]:
            pass
        store.moved_at = time.monotonic() - 40
        assert reports.get(timeout=WITHIN_S)["save_wait_s"] >= 40
    while reports.get(timeout=WITHIN_S)["save_wait_s"]:
        pass
    assert [line.rpartition(" for ")[0] for line in lines] == ["the save of step 12 has waited for the store"] * 2


def test_a_save_whose_store_works_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_run, "LOOK_EVERY_S", 0.001)
    reports: list[dict[str, Any]] = []
    store = SimpleNamespace(moved_at=0.0)
    run = SimpleNamespace(checkpoints=store, report=lambda **metrics: reports.append(metrics), log=reports.append)
    with TrainingRun.saving(cast(TrainingRun, run), 12):
        store.moved_at = time.monotonic() + 3600
    assert not reports
