"""`make pictures`: takes the pictures of docs/pictures/page anew, of a demo run with a failure in it."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.browser.conftest import PROGRAMS, ROOT, OpenTab, Ui, cluster_with_key
from tests.support.deadlines import met
from tests.support.gateway_process import PAYLOAD, TOKEN, GatewayUnderTest
from unified.api.builder import DLJobBuilder
from unified.testing import LocalCluster, eventually

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1800)]

FOLDER = ROOT / "docs/pictures/page"
DEMO = Path("/tmp/demo")
"""Its paths are on the pictures."""
PAGES = {
    "overview": ("/", ".attention li a"),
    "jobs": ("/jobs", ".table-body a"),
    "summary": ("/jobs/pretrain-1", ".grid canvas"),
    "root-cause": ("/jobs/tune-2", ".root-cause"),
    "timeline": ("/jobs/pretrain-1/timeline", ".timeline canvas"),
    "metrics": ("/jobs/pretrain-1/metrics", ".chart canvas"),
    "workers": ("/jobs/pretrain-1/workers", ".table-body a"),
    "logs": ("/jobs/pretrain-1/logs", ".line"),
    "data": ("/jobs/pretrain-1/data", ".plain"),
    "why": ("/jobs/tune-2/why", ".decisions"),
    "stacks": ("/jobs/pretrain-1/stacks", ".stack"),
    "nodes": ("/nodes", ".table-body a"),
    "node": ("/nodes/node-1", ".devices"),
    "datasets": ("/datasets", ".plain"),
    "tasks": ("/tasks", ".plain"),
    "all-logs": ("/logs", ".log-jobs"),
    "about": ("/about", ".licences"),
}
SIZES = {1440: 900, 390: 844}
COLOURS = 256
STEP_OF_KILL, STEP_OF_PICTURES = 90, 220


def job(entry: str, nodes: int, ranks: int, max_restart: int = 5) -> Any:
    builder = DLJobBuilder().node_num(nodes).device_per_node(4).device_type("CPU").config({"folder": str(DEMO)})
    role = builder.train(entry).nnodes(nodes).nproc_per_node(ranks).resource(accelerator=1)
    return role.max_restart(max_restart).end().build()


def step_of(cluster: LocalCluster, name: str) -> int:
    steps = [worker.progress.step or 0 for worker in cluster.status(name).workers if worker.progress]
    return min(steps, default=0)


@pytest.fixture
def demo() -> Iterator[LocalCluster]:
    """Sixteen devices on four nodes, and all kinds of jobs."""
    shutil.rmtree(DEMO, ignore_errors=True)
    DEMO.mkdir()
    (DEMO / "web-text.jsonl").write_text("".join(f"{json.dumps({'text': str(line)})}\n" for line in range(20_000)))
    shutil.copy(PROGRAMS / "demo_jobs.py", DEMO)  # no path of a checkout is on a picture, and no name of who took it
    with pytest.MonkeyPatch.context() as monkeypatch, cluster_with_key(DEMO, nodes=4) as cluster:
        monkeypatch.syspath_prepend(str(DEMO))
        monkeypatch.setattr("unified.job.driver.submitter", lambda: "ada@login-1:2041")
        pretrain = cluster.submit(job("demo_jobs.pretrain", 2, 4), "pretrain")
        assert cluster.submit(job("demo_jobs.tune", 1, 4, max_restart=0), "tune").wait(timeout=met(200)) == 1
        assert cluster.submit(job("demo_jobs.evaluate", 1, 1), "evaluate").wait(timeout=met(200)) == 0
        cluster.submit(job("demo_jobs.pretrain", 4, 4), "ablation")  # waits for room
        eventually(lambda: step_of(cluster, "pretrain") > STEP_OF_KILL, timeout=met(400))
        os.kill(cluster.workers(pretrain)["ELASTIC_8-5_4-1"], signal.SIGKILL)
        gateway = GatewayUnderTest(DEMO, "--master", cluster.address, "--host", "127.0.0.1")
        payload = {**PAYLOAD, "run_id": "sft-tiny", "cpus_per_node": 1000}  # waits for such a node
        assert gateway.client.post("/train", json=payload, headers={"X-TRAINER-TOKEN": TOKEN}).status_code == 201
        gateway.stop()
        eventually(lambda: step_of(cluster, "pretrain") > STEP_OF_PICTURES, timeout=met(400))
        yield cluster
    shutil.rmtree(DEMO)


def test_take_the_pictures(demo: LocalCluster, open_tab: OpenTab) -> None:
    ui = Ui(demo.address)
    try:
        tab = open_tab(ui.origin)
        tab.suffix = demo.status("pretrain").job_id.rpartition("-")[2]
        tab.page.goto(ui.url)
        tab.page.wait_for_selector(".strip")
        FOLDER.mkdir(parents=True, exist_ok=True)
        for name, (path, element) in PAGES.items():
            for width, height in SIZES.items():
                tab.page.set_viewport_size({"width": width, "height": height})
                tab.open(path, "main h1")
                if name == "stacks":
                    tab.page.click("text=Take stacks")
                tab.page.wait_for_selector(element)
                tab.page.wait_for_timeout(1500)  # for what is drawn after it
                for scheme in ("light", "dark"):
                    tab.page.emulate_media(color_scheme=scheme)
                    tab.page.wait_for_timeout(300)
                    save(tab.page.screenshot(), FOLDER / f"{name}-{scheme}-{width}.png")
    finally:
        ui.stop()


def save(picture: bytes, path: Path) -> None:
    """Write a picture with few colours, which is a quarter as large."""
    few = Image.open(io.BytesIO(picture)).convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=1)
    few.save(path, optimize=True)
