"""A pytest plugin that writes down what ran: `-p tests.support.run_record`, with RUN_RECORD naming a folder.

Each process writes a file of JSON lines, in the order in which the tests ran: a test with a digest of the examples that
Hypothesis gave it. `scripts/compare_runs.py` runs the suite twice with it and compares.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis.internal.conjecture.engine import ConjectureRunner


class Recorder:
    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}-{os.getpid()}.jsonl").open("w")
        self._digest = hashlib.sha256()
        self._num_examples = 0
        self._plain = ConjectureRunner.test_function

    def watch(self) -> None:
        """Have each example of Hypothesis go through this recorder."""
        plain = self._plain

        def test_function(runner: Any, data: Any) -> None:
            try:
                plain(runner, data)
            finally:
                self._num_examples += 1
                self._digest.update(repr(data.choices).encode())

        ConjectureRunner.test_function = test_function  # type: ignore[method-assign, assignment]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._digest = hashlib.sha256()
        self._num_examples = 0
        result = yield
        line = {"test": item.nodeid, "examples": self._num_examples, "digest": self._digest.hexdigest()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        return result


def pytest_configure(config: pytest.Config) -> None:
    recorder = Recorder(Path(os.environ["RUN_RECORD"]))
    recorder.watch()
    config.pluginmanager.register(recorder)
