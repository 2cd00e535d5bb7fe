"""Progress: merged, coalesced, the last word always sent; and the series, in which each step has its own values."""

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from unified.errors import ProtocolError, UsageError
from unified.protocol.framing import Codec
from unified.protocol.records import MAX_METRICS, MAX_POINTS, Progress, WorkerReport
from unified.protocol.worker_agent import Reported
from unified.worker.progress import Reporter, _device_memory_mb


class Sent(list[Progress]):
    """What was sent, and an event for the first."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[WorkerReport] = []
        self.first = threading.Event()
        self.reporter = Reporter(self.take, interval_s=60)

    def take(self, word: Reported) -> None:
        self.append(word.progress)
        self.points += word.points
        self.first.set()

    def series(self) -> list[tuple[int, int | None, dict[str, Any]]]:
        self.reporter.flush()
        return [(point.number, point.step, dict(point.metrics)) for point in self.points]


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
    assert sent.first.wait(60)
    for step in range(1000):
        sent.reporter.report(step, None, {"loss": 1 / (step + 1)})
    sent.reporter.flush()
    assert (len(sent), sent[-1]) == (2, Progress(step=999, total=1000, metrics={"loss": 0.001}))


def test_each_step_is_a_point_with_its_own_values() -> None:
    sent = Sent()
    sent.reporter.report(0, 900, {})
    assert sent.first.wait(30)
    for step in range(1, 900):
        sent.reporter.report(step, 900, {})
        if step % 2:
            sent.reporter.report(step, None, {"loss": 1.0 * step})
            sent.reporter.report(None, None, {"accuracy": step, "loss": 2.0 * step})
    assert sent.series() == [
        (step, step, {"loss": 2.0 * step, "accuracy": step} if step % 2 else {}) for step in range(900)
    ]
    times = [point.at for point in sent.points]
    assert times == sorted(times)


def test_what_is_reported_later_with_a_step_that_was_sent_is_a_part_of_its_point() -> None:
    sent = Sent()
    sent.reporter.report(4, 6, {"loss": 3.0})
    sent.series()
    sent.reporter.report(4, 6, {})
    sent.reporter.report(None, None, {"eval_loss": 2.0})
    sent.reporter.report(3, None, {"loss": 4.0})
    assert sent.series() == [(0, 4, {"loss": 3.0}), (0, 4, {"eval_loss": 2.0}), (1, 3, {"loss": 4.0})]


def test_without_steps_each_report_is_a_point() -> None:
    sent = Sent()
    for depth in (5, 5, 6):
        sent.reporter.report(None, None, {"depth": depth})
    assert sent.series() == [(0, None, {"depth": 5}), (1, None, {"depth": 5}), (2, None, {"depth": 6})]


@pytest.mark.parametrize("num_metrics", [1, MAX_METRICS])
def test_an_agent_that_takes_nothing_has_old_points_thinned(num_metrics: int) -> None:
    sent, may_go = Sent(), threading.Event()

    def take(word: Reported) -> None:
        sent.take(word)
        may_go.wait(60)

    sent.reporter = stuck = Reporter(take, interval_s=0)
    stuck.report(0, None, {})
    assert sent.first.wait(30)
    count = 4 * MAX_POINTS if num_metrics == 1 else 1000
    for step in range(1, count):
        stuck.report(step, None, {f"m{index}": step for index in range(num_metrics)})
    may_go.set()
    steps = [step for _, step, _ in sent.series() if step is not None]
    assert steps[:2] == [0, 1]
    assert steps == sorted(set(steps))
    assert len(steps) <= MAX_POINTS
    newest = min(count // 16, 60)
    assert steps[-newest:] == list(range(count - newest, count)), "the newest are all there"
    assert all(metrics == {f"m{index}": step for index in range(num_metrics)} for _, step, metrics in sent.series()[1:])


def test_the_load_of_devices_is_that_of_torch_if_it_uses_any(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = {0: 0, 1: 3 * 2**30}
    cuda = SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 2, memory_reserved=reserved.get)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert _device_memory_mb() == 3100.0
    cuda.is_initialized = lambda: False
    assert _device_memory_mb() is None


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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"step": 2**70}, r"report\(step=1180591620717411303424\) takes a number of less than 64 bits"),
        ({"total": -(2**63)}, "less than 64 bits"),
        ({"loss": 10**400}, r"report\(loss=…\) takes a number that a float can hold"),
        ({"n" * 201: 1}, r"report\(n{20}…=…\): a name has 200 characters at most, not 201"),
        ({"\ud800": 1}, r"report\(\): '\\ud800' is no text that can be sent"),
        ({"phase": "a\udfff"}, r"report\(\): 'a\\udfff' is no text"),
    ],
)
def test_refuses_what_cannot_be_sent_and_names_it(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        last(**given)


def test_names_beyond_the_first_256_are_left_out_and_that_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    sent = Sent()
    for step in range(3):
        sent.reporter.report(step, None, {f"m{index}": index + step for index in range(20_000)})
    sent.reporter.report(3, None, {"m0": 7.0, "late": 1, "text": "x" * 5000})
    sent.reporter.flush()
    assert (sent[-1].step, len(sent[-1].metrics), sent[-1].metrics["m0"]) == (3, MAX_METRICS, 7.0)
    assert "late" not in sent[-1].metrics
    assert capsys.readouterr().err == (
        "unified: 256 metrics of a worker are kept at most: 'm256' and later ones are not.\n"
    )


@pytest.mark.parametrize("metrics", [{str(index): 1 for index in range(257)}, {"n" * 201: 1}, {"n": "v" * 201}])
def test_a_worker_that_sends_more_is_not_believed(metrics: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        Codec(Progress).decode_body(Codec(Progress).encode_body(Progress(metrics=metrics)))
    with pytest.raises(ProtocolError):
        said([WorkerReport(at=1.0, step=1, total=None, metrics=metrics)])


def said(points: list[WorkerReport]) -> Reported:
    return Codec(Reported).decode_body(Codec(Reported).encode_body(Reported(progress=Progress(), points=points)))


def test_nor_is_one_that_sends_too_many_points_or_impossible_ones() -> None:
    point = WorkerReport(at=1.0, step=1, total=None, metrics={"loss": float("nan")})
    assert len(said([point] * MAX_POINTS).points) == MAX_POINTS
    for points in ([point] * (MAX_POINTS + 1), [replace(point, at=1e300)], [replace(point, number=-1)]):
        with pytest.raises(ProtocolError):
            said(points)
