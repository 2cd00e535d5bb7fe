"""A simulated cluster of training jobs under faults: it holds together, and its seed decides everything."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from unified_simulator.simulation import Simulation, SimulationOptions, SimulationReport

OPTIONS = SimulationOptions(
    nodes=40,
    workers=4,
    hours=6.0,
    job_nodes=[1, 4, 12],
    job_hours=2.0,
    checkpoint_minutes=10.0,
    spare=0.1,
    in_place=False,
    node_days=4.0,
    rack_days=0.4,
    worker_days=8.0,
    zygote_days=4.0,
    cut_days=4.0,
    master_days=0.1,
    rack_size=4,
    repair_hours=0.5,
    delay_ms=1.0,
    loss=0.001,
    seed=5,
)

MAIN = "import sys; from unified.cli.main import main; sys.exit(main())"


def facts(report: SimulationReport) -> dict[str, object]:
    """What the seed decides: not how quick this machine is."""
    found = msgspec.to_builtins(report)
    names = ("events", "decisions", "faults", "jobs_finished", "jobs_running", "recoveries", "goodput")
    return {name: found[name] for name in (*names, "recovery_p50_s", "recovery_p99_s")}


@pytest.mark.parametrize("in_place", [False, True], ids=["restart", "in-place"])
def test_jobs_outlive_every_kind_of_fault(in_place: bool) -> None:
    report = Simulation(msgspec.structs.replace(OPTIONS, in_place=in_place)).run()
    assert report.faults.keys() == {"node", "rack", "worker", "zygote", "cut", "master"}
    assert report.jobs_finished > 5
    assert report.recoveries > 10
    assert 0.5 < report.goodput < 1


def test_a_seed_decides_everything() -> None:
    options = msgspec.structs.replace(OPTIONS, hours=2.0)
    lines: list[list[str]] = [[], []]
    reports = []
    for own in lines:

        def watch(now: float, who: str, what: object, own: list[str] = own) -> None:
            own.append(f"{now!r} {who} {what}")

        reports.append(facts(Simulation(options, watch).run()))
    assert reports[0] == reports[1]
    assert len(lines[0]) > 1000
    assert lines[0] == lines[1]


def test_the_command_prints_the_report_and_writes_decisions(tmp_path: Path) -> None:
    transcript = tmp_path / "decisions.txt"
    words = ["--nodes", "20", "--hours", "1", "--node-days", "0.1", "--job-nodes", "1,4", "--json"]
    command = [sys.executable, "-c", MAIN, "simulate", *words, "--transcript", str(transcript)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["options"]["nodes"] == 20
    assert report["recoveries"] > 0
    assert report["kinds"]["AgentHeartbeat"]["number"] > 0
    text = transcript.read_text()
    assert "node-lost" in text
    assert "round-sealed" in text
