"""Progress: merged, coalesced, the last word always sent."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from unified.protocol.records import Progress
from unified.worker.progress import Reporter


class Sent(list[Progress]):
    """What was sent, and an event for the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = threading.Event()
        self.reporter = Reporter(self.take, interval_s=60)

    def take(self, progress: Progress) -> None:
        self.append(progress)
        self.first.set()


class Scalar:
    """Like a 0-d tensor."""

    def __init__(self, value: Any, count: int = 1) -> None:
        self.value = value
        self.count = count

    def numel(self) -> int:
        return self.count

    def item(self) -> Any:
        return self.value


def test_many_reports_few_messages_and_the_last_is_sent() -> None:
    sent = Sent()
    sent.reporter.report(0, 1000, {})
    assert sent.first.wait(5)
    for step in range(1000):
        sent.reporter.report(step, None, {"loss": 1 / (step + 1)})
    sent.reporter.flush()
    assert (len(sent), sent[-1]) == (2, Progress(step=999, total=1000, metrics={"loss": 0.001}))


def test_flush_says_nothing_twice() -> None:
    sent = Sent()
    sent.reporter.flush()
    assert sent == []
    sent.reporter.report(1, None, {})
    sent.reporter.flush()
    sent.reporter.flush()
    assert len(sent) == 1


def last(**given: Any) -> Progress:
    sent = Sent()
    sent.reporter.report(given.pop("step", None), given.pop("total", None), given)
    sent.reporter.flush()
    return sent[-1]


def test_what_is_not_named_keeps_its_value() -> None:
    sent = Sent()
    sent.reporter.report(1, 10, {"loss": 2.0})
    sent.reporter.report(None, None, {"accuracy": 0.5})
    sent.reporter.flush()
    assert sent[-1] == Progress(step=1, total=10, metrics={"loss": 2.0, "accuracy": 0.5})


def test_unread_errors_are_told_beside_the_progress() -> None:
    sent = Sent()
    sent.reporter.report(1, 10, {})
    sent.reporter.count_unread(3)
    sent.reporter.report(2, None, {})
    sent.reporter.flush()
    assert sent[-1] == Progress(step=2, total=10, num_unread_errors=3)


def test_takes_numbers_texts_and_scalars() -> None:
    progress = last(step=Scalar(3), total=4.0, loss=Scalar(0.5), count=2**70, phase="warm-up", ok=True)
    assert progress == Progress(
        step=3, total=4, metrics={"loss": 0.5, "count": float(2**70), "phase": "warm-up", "ok": 1}
    )
    assert isinstance(progress.metrics["count"], float)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": Scalar(None, count=4)}, r"report\(loss=…\) takes one number; this Scalar has 4"),
        ({"loss": [1]}, r"report\(loss=\[1\]\) takes a number, a text or a 0-d tensor, not list"),
        ({"loss": SimpleNamespace()}, "not SimpleNamespace"),
        ({"step": "one"}, "takes a whole number"),
        ({"step": 1.5}, "takes a whole number"),
        ({"total": float("nan")}, "takes a whole number"),
    ],
)
def test_refuses_the_rest_and_names_it(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        last(**given)
