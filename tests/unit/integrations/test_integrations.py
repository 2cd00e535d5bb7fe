"""Callbacks for other libraries: what they report, and what they say if the library is missing.

`tests/training/test_integrations.py` runs them with the real libraries.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from unified.integrations import report
from unified.worker.context import set_current_worker


class Heard:
    """A worker that keeps its reports."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, int | None, dict[str, Any]]] = []

    def report(self, step: int, total: int | None = None, **metrics: Any) -> None:
        self.reports.append((step, total, metrics))


@pytest.fixture
def heard() -> Iterator[Heard]:
    worker = Heard()
    set_current_worker(worker)  # type: ignore[arg-type]
    yield worker
    set_current_worker(None)


def test_numbers_are_reported_and_other_values_are_not(heard: Heard) -> None:
    report(3, 10, {"loss": 0.5, "num": 7, "text": "x", "rows": torch.ones(2), "grad_norm": torch.tensor(2.0)})
    assert heard.reports == [(3, 10, {"loss": 0.5, "num": 7, "grad_norm": torch.tensor(2.0)})]


def test_no_name_in_a_log_ends_the_training(heard: Heard) -> None:
    report(3, None, {"step": 1.0, "total": 2.0, "self": 3.0, "n" * 201: 4.0, "rewards/a b": 5.0})
    assert heard.reports == [(3, None, {"rewards/a b": 5.0})]


def test_outside_of_a_worker_nothing_happens(heard: Heard) -> None:
    set_current_worker(None)
    report(3, 10, {"loss": 0.5})
    assert heard.reports == []


@pytest.mark.parametrize(("library", "extra"), [("transformers", "hf"), ("lightning", "nemo")])
def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, library: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"unified.integrations.{library}", raising=False)
    monkeypatch.delitem(sys.modules, "pytorch_lightning", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"unified\.integrations\.{library} needs .*\[{extra}\]"):
        importlib.import_module(f"unified.integrations.{library}")
