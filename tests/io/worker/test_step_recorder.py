"""The record of one step, by the real torch.profiler."""

import gzip
import json
import queue
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.support.deadlines import missed
from unified.protocol.worker_agent import Reported
from unified.worker import step_recorder
from unified.worker.progress import Reporter
from unified.worker.step_recorder import StepRecorder

DEADLINE_S = 100.0


class Recorded:
    """A recorder behind a reporter, and its answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.recorder = StepRecorder(str(folder / "0.err"), self.answers.put)
        self.reporter = Reporter(lambda reported: None)
        self.reporter.recorder = self.recorder

    def step(self, number: int) -> None:
        self.reporter.report(number, None, {"loss": 0.5})

    def answer(self) -> str:
        return self.answers.get(timeout=DEADLINE_S)

    def names(self) -> list[str]:
        trace = json.loads(gzip.decompress((self.folder / "0.profile").read_bytes()))
        return [event["name"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path)


def test_it_records_from_one_new_step_to_the_next(recorded: Recorded) -> None:
    recorded.step(1)
    recorded.recorder.begin(DEADLINE_S)
    recorded.step(1)
    torch.ones(2).neg()
    recorded.step(2)
    torch.ones(2).abs()
    other = threading.Thread(target=recorded.step, args=(3,))
    other.start()
    other.join()
    torch.ones(2).exp()
    recorded.step(4)
    torch.ones(2).neg()
    assert recorded.answer() == ""
    names = recorded.names()
    assert {"aten::abs", "aten::exp"} <= set(names)
    assert "aten::neg" not in names
    assert recorded.recorder.is_idle
    assert [path.name for path in recorded.folder.iterdir()] == ["0.profile"]


def test_a_step_that_does_not_come_or_does_not_end_in_time(recorded: Recorded) -> None:
    recorded.recorder.begin(missed(0.2))
    assert "reported no step within" in recorded.answer()
    recorded.step(1)
    recorded.recorder.begin(missed(0.5))
    recorded.step(2)
    assert "did not end the step that it had begun within" in recorded.answer()
    recorded.recorder.begin(DEADLINE_S)
    assert "has not ended yet" in recorded.answer()
    recorded.step(3)
    assert recorded.recorder.is_idle
    recorded.recorder.begin(DEADLINE_S)
    recorded.step(4)
    recorded.step(5)
    assert recorded.answer() == ""


def test_what_keeps_it_from_recording_is_said(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        recorded.recorder.begin(DEADLINE_S)
        recorded.step(1)
        assert recorded.answer() == "torch.profiler: the program itself runs a profiler already"
    with monkeypatch.context() as patched:
        patched.setattr(step_recorder, "MAX_PROFILE_BYTES", 10)
        recorded.recorder.begin(DEADLINE_S)
        recorded.step(2)
        recorded.step(3)
        assert "MiB, more than" in recorded.answer()
    assert list(recorded.folder.iterdir()) == []
    monkeypatch.delitem(sys.modules, "torch")
    recorded.recorder.begin(DEADLINE_S)
    assert recorded.answer() == "it has not imported torch"


def test_a_reporter_goes_on_without_a_request(recorded: Recorded) -> None:
    words: list[Reported] = []
    reporter = Reporter(words.append)
    reporter.recorder = recorded.recorder
    reporter.report(1, 2, {})
    reporter.flush()
    assert words[-1].progress.step == 1
    assert recorded.answers.empty()
