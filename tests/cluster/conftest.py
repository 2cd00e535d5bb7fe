"""Code for workers, written by a test, and a bucket."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.support.fake_nvml import fake_nvml  # noqa: F401 - a fixture
from tests.support.s3 import s3_environment, s3_server  # noqa: F401 - fixtures, one server for the whole session


class Project(Protocol):
    """Writes modules that workers can import."""

    def __call__(self, **modules: str) -> None: ...


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A folder that this process and its workers import from; what was imported of it is forgotten with the test."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def write(**modules: str) -> None:
        for name, text in modules.items():
            (folder / f"{name}.py").write_text(textwrap.dedent(text))

    before = set(sys.modules)
    yield write
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", "") and str(folder) in str(sys.modules[name].__file__):
            del sys.modules[name]
