"""Ray's dashboard, looked at by the same browser and by clients that ask what its page asks."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.bus.scale import end
from benchmarks.bus.work import pss_mib
from benchmarks.page import report, viewers
from benchmarks.page.cluster import Usage

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "out/peers/ray/bin/python"
VERSION = "2.60.0"
START_S = 400.0
HEAPS = 8
Reading = tuple[str, str, float]


def measure(actors: int, seconds: float, rounds: int) -> Iterator[Reading]:
    """Figures of a dashboard with so many actors, which do nothing."""
    with runtime(actors) as told, viewers.browser() as context:
        url, processes = told["url"], [psutil.Process(pid) for pid in told["dashboard"]]
        tab = viewers.Tab(context, "() => ''")
        asked: list[str] = []
        tab.page.on(
            "request",
            lambda request: (
                asked.append(request.url)
                if request.resource_type == "fetch" or request.resource_type == "xhr"
                else None
            ),
        )
        for _ in range(rounds):
            yield "ray", "first_s", tab.open(f"{url}/#/overview", "main, [class*=MuiPaper]")
            tab.page.goto("about:blank")
            yield "ray", "job_s", tab.open(f"{url}/#/actors", "table tbody tr")
            tab.page.wait_for_timeout(5000)
            asked.clear()
            tab.page.wait_for_timeout(1000 * seconds)
            with asking(sorted(asked), seconds):
                usages, gcs = [Usage(each) for each in processes], Usage(psutil.Process(told["gcs"]))
                heaps = []
                for _ in range(HEAPS):
                    tab.page.wait_for_timeout(1000 * seconds / HEAPS)
                    heaps.append(tab.heap_mb())
                yield "ray", "gateway_cpu", sum(each.percent() for each in usages)
                yield "ray", "master_cpu", gcs.percent()
            yield "ray", "gateway_mb", sum(pss_mib(each.pid) for each in processes) * 2**20 / 1e6
            yield "ray", "heap_mb", max(heaps)
            yield "ray", "elements", tab.elements()


@contextmanager
def runtime(actors: int) -> Iterator[dict[str, Any]]:
    """Ray with a dashboard, in the environment that `make peers` has made."""
    if not PYTHON.exists():
        raise RuntimeError("Ray is not installed here: make peers")
    command = [str(PYTHON), "-m", "benchmarks.peers.ray_dashboard", str(actors)]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    started = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def hear() -> dict[str, Any]:
        for line in started.stdout or ():
            if line.startswith("{"):  # Ray prints there, too
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError("Ray's driver has ended")

    timer = threading.Timer(START_S, started.kill)
    timer.start()
    try:
        told = hear()
        timer.cancel()
        yield told
    finally:
        timer.cancel()
        end(started, 60)


@contextmanager
def asking(urls: list[str], period_s: float) -> Iterator[None]:
    """All viewers but the browser: each asks what it asked in such a period."""
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            for url in urls:
                if is_over.wait(period_s / len(urls)):
                    return
                with urllib.request.urlopen(url, timeout=60) as answer:
                    answer.read()

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(report.VIEWERS - 1 if urls else 0)]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        is_over.set()
        for each in threads:
            each.join()
