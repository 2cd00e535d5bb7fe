"""Metrics, rules and dashboards with a real Prometheus, which is installed where root may.

The alert on a role that stands still needs a quarter of an hour, so promtool plays it (`rules_test.yml`).
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from tests.support.deadlines import met
from tests.support.gateway_process import TOKEN, GatewayUnderTest
from tests.support.master_process import StartMaster
from tests.support.packages import install
from tests.support.ports import unused_port
from unified.testing import eventually

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parents[2] / "deploy/monitoring"
CODE = """
import time
from unified import current_worker

def train():
    me = current_worker()
    for step in range(100_000):
        me.report(step=step, total=100_000, loss=1 / (step + 1))
        time.sleep(0.1)
        if step == 20 and me.incarnation == 0 and me.actor_info.rank == 0:
            raise SystemExit(3)
"""
SUBMIT = """
from unified.api.builder import DLJobBuilder
builder = DLJobBuilder().node_num(2).device_per_node(1)
builder = builder.workload("trainer", "watched_job.train").total(2).per_group(1).max_restart(3)
builder.build().submit("watched", blocking=False)
"""
EMPTY_HERE = {"Killed for want of memory", "Nodes that are lost"}
"""Panels about what does not happen in the run; of these the query has to be right, and may find nothing."""


@pytest.fixture(scope="module")
def promtool() -> str:
    """The command, with that of the server beside it."""
    if shutil.which("promtool") is None:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            pytest.skip("promtool is not here, and only root can install it, by apt")
        if why := install(["prometheus"]):
            pytest.skip(f"Prometheus cannot be installed: {why}")
    return "promtool"


@pytest.fixture(scope="module")
def dashboards() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dashboards", FOLDER / "dashboards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dashboards"] = module
    spec.loader.exec_module(module)
    return module


def checked(*command: str, text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=100, cwd=FOLDER)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_rules_are_rules_and_each_raises_its_alert(promtool: str) -> None:
    assert "10 rules found" in checked(promtool, "check", "rules", "rules.yml")
    checked(promtool, "test", "rules", "rules_test.yml")
    tested = (FOLDER / "rules_test.yml").read_text()
    alerts = [line.split()[-1] for line in (FOLDER / "rules.yml").read_text().splitlines() if "- alert:" in line]
    assert not [alert for alert in alerts if f"alertname: {alert}\n        exp_alerts" not in tested]


def test_dashboards_are_as_their_tables_say(dashboards: ModuleType) -> None:
    for name in dashboards.DASHBOARDS:
        assert (FOLDER / f"{name}.json").read_text() == dashboards.text_of(name), "run deploy/monitoring/dashboards.py"


def test_a_step_that_falls_at_a_resume_is_no_speed(promtool: str, dashboards: ModuleType, tmp_path: Path) -> None:
    (panel,) = (panel for panel in dashboards.RUN if panel.title == "Steps a second")
    ((query, _),) = panel.queries
    series = 'unified_role_step{job_id="a-1", role="t", of="fastest"}'
    wanted = {"1m": 2.0, "2m": 0.0, "4m": 2.0}  # of the fall from 180 to 62, nothing
    test = {
        "interval": "15s",
        "input_series": [{"series": series, "values": "0+30x6 62+30x12"}],
        "promql_expr_test": [
            {
                "expr": query.replace("$job", "a-1"),
                "eval_time": at,
                "exp_samples": [{"labels": '{job_id="a-1", role="t", of="fastest"}', "value": value}],
            }
            for at, value in wanted.items()
        ],
    }
    path = tmp_path / "test.yml"
    path.write_text(json.dumps({"rule_files": [], "evaluation_interval": "15s", "tests": [test]}))
    checked(promtool, "test", "rules", str(path))


class Site:
    """A master, two agents with metrics, a gateway, and a Prometheus that finds them."""

    def __init__(self, folder: Path, master: str) -> None:
        self.master = master
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self.env = {**os.environ, "UNIFIED_MASTER": master, "UNIFIED_RUN_DIR": str(folder / "run")}
        self.env |= {"PYTHONPATH": str(folder), "UNIFIED_HEARTBEAT_S": "0.2"}
        for number in (1, 2):
            words = ["--node-id", f"n{number}", "--devices", "1", "--state-dir", str(folder / f"n{number}")]
            self.start(sys.executable, "-m", "unified_agent", *words, "--metrics-bind", "127.0.0.1:0")
        self.gateway = GatewayUnderTest(folder, "--master", master)
        self.url = f"http://127.0.0.1:{unused_port()}"

    def start(self, *command: str) -> None:
        log = (self.folder / "daemons.log").open("ab")
        with log:
            self.processes.append(subprocess.Popen(command, env=self.env, stdout=log, stderr=log))

    def start_prometheus(self) -> None:
        """Scrape each second, with the token as Prometheus sends one."""
        authorization = {"type": "Bearer", "credentials": TOKEN}
        gateway = self.gateway.url.removeprefix("http://")
        found = {"url": f"{self.gateway.url}/sd/prometheus", "authorization": authorization, "refresh_interval": "1s"}
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(FOLDER / "rules.yml")],
            "scrape_configs": [
                {"job_name": "gateway", "authorization": authorization, "static_configs": [{"targets": [gateway]}]},
                {"job_name": "agents", "http_sd_configs": [found]},
            ],
        }
        path = self.folder / "prometheus.yml"
        path.write_text(json.dumps(config))  # which is YAML, too
        where = [
            "--storage.tsdb.path",
            str(self.folder / "tsdb"),
            "--web.listen-address",
            self.url.removeprefix("http://"),
        ]
        self.start("prometheus", "--config.file", str(path), *where)

    def query(self, text: str) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": text}, timeout=100).json()
        assert answer["status"] == "success", f"{text}: {answer}"
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def close(self) -> None:
        self.gateway.stop()
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            process.wait(met(100))


@pytest.fixture
def site(tmp_path: Path, start_master: StartMaster) -> Iterator[Site]:
    made = Site(tmp_path, start_master().address)
    yield made
    made.close()


def test_a_real_prometheus_finds_agents_and_each_panel_has_data(
    site: Site, promtool: str, dashboards: ModuleType
) -> None:
    (site.folder / "watched_job.py").write_text(CODE)
    site.start_prometheus()
    subprocess.run([sys.executable, "-c", SUBMIT], env=site.env, check=True, timeout=100, cwd=site.folder)

    def has(text: str) -> Callable[[], bool]:
        return lambda: _is_up(site) and bool(site.query(text))

    eventually(has('up{job="agents"} == 1'), timeout=100, message=site.gateway.client.get("/sd/prometheus").text)
    eventually(has("unified_job_restarts_total > 0"), timeout=200, message="the worker did not restart")
    eventually(has('unified_role_step{of="slowest"} > 5'), timeout=200, message="no step after the restart")
    assert {each["metric"]["node"] for each in site.query('up{job="agents"}')} == {"n1", "n2"}
    for name, (_, panels) in dashboards.DASHBOARDS.items():
        for panel in panels:
            for text, _legend in panel.queries:
                asked = text.replace("$job", ".*")
                if panel.title in EMPTY_HERE:
                    site.query(asked)
                else:
                    eventually(has(asked), timeout=100, message=f"{name}: {panel.title}: {asked}")
    for text in (site.gateway.client.get("/metrics").text, _agent_metrics(site)):
        checked(promtool, "check", "metrics", text=text)
    spent = sum(float(each["value"][1]) for each in site.query("unified_job_time_seconds"))
    (age,) = site.query("timestamp(unified_job_submitted_timestamp_seconds) - unified_job_submitted_timestamp_seconds")
    assert spent == pytest.approx(float(age["value"][1]), rel=0.05, abs=3.0)


def _is_up(site: Site) -> bool:
    try:
        return httpx.get(f"{site.url}/-/ready", timeout=100).status_code == 200
    except httpx.TransportError:
        return False


def _agent_metrics(site: Site) -> str:
    (first, *_) = site.gateway.client.get("/sd/prometheus").json()
    return httpx.get(f"http://{first['targets'][0]}/metrics", timeout=100).text
