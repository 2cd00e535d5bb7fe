"""A real agent's metrics, over HTTP and as a file, with a worker that comes and goes."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.agents import AgentProcess, PlayedMaster, a_job, a_worker, eventually
from tests.support.ports import unused_port
from tests.support.probes import get, get_or_none
from unified.protocol.records import WorkerState


def values(text: str) -> dict[tuple[str, str], float]:
    """Return the values by name and by the label that tells the series of this test apart."""
    return {
        (
            sample.name,
            sample.labels.get("of", sample.labels.get("state", sample.labels.get("job_id", ""))),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.slow
def test_metrics_of_an_agent(tmp_path: Path, agents: list[AgentProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    port, master, file = unused_port(), PlayedMaster(), tmp_path / "unified.prom"
    flags = ["--metrics-bind", f"127.0.0.1:{port}", "--metrics-file", str(file), "--devices", "2"]
    agents.append(AgentProcess(tmp_path, master.address, *flags))
    eventually(lambda: get_or_none(port, "/metrics"))
    assert values(get(port, "/metrics")[1])["unified_agent_master_connected", ""] == 0
    assert values(file.read_text())["unified_agent_master_connected", ""] == 0
    assert master.welcome().metrics == f"127.0.0.1:{port}"
    master.desire(a_worker(), jobs=[a_job("stubborn")])
    pid = master.reaches("w-0#0", WorkerState.RUNNING).pid
    known = ("unified_agent_workers", "RUNNING")
    eventually(lambda: values(get(port, "/metrics")[1]).get(known) == 1, message=get(port, "/metrics")[1])
    found = values(get(port, "/metrics")[1])
    assert found["unified_agent_master_connected", ""] == 1
    assert found["unified_worker_memory_bytes", "max"] == found["unified_worker_memory_bytes", "sum"] > 1_000_000
    times = psutil.Process(pid).cpu_times()
    assert 0 <= found["unified_worker_cpu_seconds_total", "job-1"] <= times.user + times.system
    assert found["unified_agent_oom_kills_total", "job-1"] == 0, "increase() needs it before the first kill"
    assert 'unified_device_info{index="1",job_id="",kind="virtual"' in get(port, "/metrics")[1]
    assert get(port, "/metric")[0] == 404
    agents[0].process.terminate()
    agents[0].wait()
    master.hang_up()
    assert not file.exists(), "old values would be told for new ones"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--metrics-bind", "9"], "--metrics-bind '9' is no address"),
        (["--metrics-file", "/dev/null/x.prom"], "cannot write /dev/null/x.prom for --metrics-file"),
    ],
)
def test_what_cannot_be_is_a_sentence(tmp_path: Path, flags: list[str], words: str) -> None:
    command = [
        sys.executable,
        "-m",
        "unified_agent",
        "--master",
        "tcp://127.0.0.1:9",
        "--state-dir",
        str(tmp_path),
        *flags,
    ]
    env = {**os.environ, "UNIFIED_RUN_DIR": str(tmp_path / "run")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
