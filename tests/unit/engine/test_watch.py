"""An engine is ready when it says so, and has failed when it is silent, sick, or makes no token for too long."""

from typing import Any

import pytest

from unified.engine.watch import OPEN, TOKENS, EngineLook, EngineWatch, counted, engine_kind
from unified.job.spec import EngineOptions

WELL = EngineLook(200)
SILENT = EngineLook(None, "timed out")


def watched(*looks: tuple[float, EngineLook], **options: Any) -> list[str]:
    """Take looks in at these times, from a start at 0; return the reasons."""
    watch = EngineWatch(0.0, EngineOptions(command=["x"], **options))
    return [watch.step(now, look) for now, look in looks]


def test_an_engine_is_ready_with_its_first_good_answer() -> None:
    watch = EngineWatch(0.0, EngineOptions(command=["x"], start_timeout=60.0))
    assert watch.step(1.0, SILENT) == ""
    assert watch.step(2.0, EngineLook(503)) == ""
    assert not watch.is_ready
    assert watch.step(59.0, WELL) == ""
    assert watch.is_ready


@pytest.mark.parametrize(
    ("look", "reason"),
    [
        (SILENT, "GET /health has not answered (timed out) for 60 s since its start"),
        (EngineLook(503), "GET /health has answered 503 for 60 s since its start"),
    ],
)
def test_an_engine_that_never_gets_ready_has_failed(look: EngineLook, reason: str) -> None:
    assert watched((1, look), (59.9, look), (60, look), start_timeout=60.0) == ["", "", reason]


@pytest.mark.parametrize(
    ("look", "reason"),
    [
        (SILENT, "GET /health has not answered (timed out) for 15 s"),
        (EngineLook(500), "GET /health has answered 500 for 15 s"),
    ],
)
def test_a_sick_engine_has_failed_after_a_while(look: EngineLook, reason: str) -> None:
    assert watched((1, WELL), (2, look), (15.9, look), (16, look), unhealthy_timeout=15.0)[1:] == ["", "", reason]


def test_one_bad_answer_is_forgiven() -> None:
    looks = [(at, SILENT if at % 10 else WELL) for at in range(100)]
    assert set(watched(*looks, unhealthy_timeout=15.0)) == {""}


def test_open_requests_without_tokens_are_a_failure() -> None:
    stuck = EngineLook(200, "", 2, 100)
    reason = "2 requests are open, and it has made no token for 60 s"
    assert watched((0, stuck), (1, stuck), (60, stuck), stall_timeout=60.0) == ["", "", reason]


def test_an_idle_engine_and_a_slow_one_are_well() -> None:
    idle = [(at, EngineLook(200, "", 0, 100)) for at in range(0, 200, 10)]
    assert set(watched(*idle, stall_timeout=60.0)) == {""}
    slow = [(at, EngineLook(200, "", 9, 100 + at // 50)) for at in range(0, 200, 10)]
    assert set(watched(*slow, stall_timeout=60.0)) == {""}


def test_no_time_limit_for_tokens() -> None:
    stuck = EngineLook(200, "", 2, 100)
    assert set(watched((0, stuck), (1e6, stuck), (2e6, stuck), stall_timeout=0.0)) == {""}


def test_a_pause_counts_for_nothing() -> None:
    watch = EngineWatch(0.0, EngineOptions(command=["x"]))
    stuck = EngineLook(200, "", 2, 100)
    watch.step(0.0, stuck)
    watch.pause(1000.0, is_well=True)
    assert watch.step(1001.0, stuck) == ""
    assert watch.step(1002.0, SILENT) == ""
    watch.pause(1100.0)
    assert watch.step(1100.0, SILENT).endswith("for 15 s"), "a paused engine answers"


METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="smol x"} 2.0
vllm:num_requests_waiting{engine="0",model_name="smol x"} 1.0
vllm:generation_tokens_total{engine="0",model_name="smol x"} 1.5e+03
vllm:prompt_tokens_total{engine="0",model_name="smol x"} 20.0
vllm:generation_tokens_created{engine="0",model_name="smol x"} 1.7e+09
"""


def test_metrics_in_prometheus_text() -> None:
    assert counted(METRICS, OPEN) == 3
    assert counted(METRICS, TOKENS) == 1520
    for text in ("", '""', "<html>\n</html>", "vllm:num_requests_running NaN\n"):
        assert counted(text, OPEN) is None


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["vllm", "serve", "m"], "vllm"),
        (["/opt/env/bin/vllm", "serve", "m"], "vllm"),
        (["python", "-m", "vllm.entrypoints.openai.api_server"], "vllm"),
        (["python3", "-m", "sglang.launch_server", "--model", "vllm"], "sglang"),
        (["env", "A=1", "python3", "-u", "/x/bin/vllm", "serve", "m"], "vllm"),
        (["uv", "run", "vllm", "serve", "m"], "vllm"),
        (["python", "-u", "-m", "sglang.launch_server"], "sglang"),
        (["python", "judge.py", "vllm"], ""),
        (["python", "-m"], ""),
    ],
)
def test_the_kind_of_an_engine(command: list[str], kind: str) -> None:
    assert engine_kind(command) == kind
