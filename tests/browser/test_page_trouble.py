"""The page while things go wrong: ranks are killed, the master or the gateway is away, and others mean harm."""

from __future__ import annotations

import contextlib
import functools
import http.server
import itertools
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.browser.conftest import MAX_ELEMENTS, OpenTab, Tab, Ui, World, cluster_with_key, job
from tests.support.deadlines import met
from tests.support.programs.page_jobs import HOSTILE_NAMES, LINK, MARKUP
from unified.api.builder import DLJobBuilder
from unified.client.handle import JobHandle
from unified.job.spec import EntryPoint, JobSpec, Resources, RoleSpec
from unified.testing import LocalCluster, eventually

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


@contextlib.contextmanager
def running(cluster: LocalCluster, described: Any, name: str | None = None) -> Iterator[JobHandle]:
    handle = cluster.submit(described, name)
    try:
        yield handle
    finally:
        handle.stop(force=True)
        handle.wait(timeout=met(200))


def test_the_root_cause_card_names_a_rank_that_was_killed(
    tab: Tab, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(world.cluster, job("page_jobs.train", max_restart=0), "killed") as handle:
        tab.open(f"/jobs/{handle.job_id}", ".grid canvas")
        tab.eventually_has("4 RUNNING")
        tab.page.evaluate("window.isTheSame = true")
        killed_at = time.monotonic()
        os.kill(world.cluster.workers(handle)["ELASTIC_4-2_2-0"], signal.SIGKILL)
        tab.page.wait_for_selector(".root-cause")
        seconds = time.monotonic() - killed_at
        card = tab.text(".root-cause")
        assert "ELASTIC-2 on node-" in card
        assert "SIGKILL" in card
        assert tab.page.evaluate("window.isTheSame"), "the page was loaded anew"
        tab.open("/", ".attention li a")
        assert "ELASTIC_4-2_2-0 on node-" in tab.text(f".attention a[href='/jobs/{handle.job_id}']")
    with capsys.disabled():  # it is to be 2 s at most on a machine that has nothing else to do
        print(f"\nthe root-cause card was there {seconds:.2f} s after the kill")


def test_a_killed_rank_that_is_replaced_shows_as_it_happens(tab: Tab, world: World) -> None:
    with running(world.cluster, job("page_jobs.train"), "hurt") as handle:
        tab.open(f"/jobs/{handle.job_id}/why", ".decisions")
        tab.eventually_has("all workers run")
        os.kill(next(iter(world.cluster.workers(handle).values())), signal.SIGKILL)
        tab.eventually_has("worker-failed")
        assert "killed by SIGKILL" in tab.text(".decisions")
        tab.page.click(".tabs a:has-text('Timeline')")
        tab.page.wait_for_selector(".timeline canvas")


def test_while_the_master_is_down_the_page_says_since_when_and_then_goes_on(open_tab: OpenTab, tmp_path: Path) -> None:
    with cluster_with_key(tmp_path, nodes=2) as cluster, contextlib.ExitStack() as stack:
        handle = cluster.submit(job("page_jobs.train"), "train")
        master = psutil.Process(cluster.master_pid)
        command, environment = master.cmdline(), master.environ()
        command[command.index("--bind") + 1] = cluster.address
        ui = Ui(cluster.address)
        stack.callback(ui.stop)
        tab = open_tab(ui.origin)
        tab.page.goto(ui.url)
        tab.page.click(".job-list a:has-text('train-1')")
        tab.eventually_has("4 RUNNING")
        tab.page.evaluate("window.isTheSame = true")
        cluster.was_hurt = True
        master.kill()
        tab.page.wait_for_selector(".banner.tone-bad")
        banner = tab.text(".banner")
        assert re.search(r"The master is down since \S*\d\d:\d\d", banner), banner
        assert re.search(r"You see the state of \S*\d\d:\d\d", banner), banner
        assert tab.text(".connection") == "master down"
        assert "4 RUNNING" in tab.text()  # what was known is still shown
        for title, element in (("Nodes", ".table"), ("Overview", ".strip")):
            tab.page.click(f"nav a:has-text('{title}')")
            tab.page.wait_for_selector(element)
            assert "The master is down since" in tab.text(".banner")
        again = subprocess.Popen(command, env=environment)
        stack.callback(again.wait, met(100))
        stack.callback(again.terminate)
        tab.page.wait_for_selector(".connection.tone-good")
        assert tab.page.locator(".banner").count() == 0
        tab.page.click(".job-list a:has-text('train-1')")
        steps = ".role-row .numbers b"
        known = tab.text(steps)
        eventually(lambda: tab.text(steps) != known, timeout=met(100), message="no new step is shown")
        assert tab.page.evaluate("window.isTheSame"), "the page was loaded anew"
        handle.stop(force=True)
        handle.wait(timeout=met(200))


def test_the_page_goes_on_when_its_gateway_was_killed_and_came_back(open_tab: OpenTab, world: World) -> None:
    first = Ui(world.cluster.address)
    tab = open_tab(first.origin)
    tab.expected.append("ERR_")  # what the browser says of a connection that breaks
    tab.page.goto(first.url)
    tab.page.wait_for_selector(".connection.tone-good")
    first.stop(signal.SIGKILL)
    tab.eventually_has("No connection to the gateway", "body")
    second = Ui(world.cluster.address, "--port", first.port)
    try:
        tab.page.wait_for_selector(".connection.tone-good")
        assert tab.page.locator(".banner").count() == 0
        assert tab.page.locator(".strip").count() == 1  # the session is good with any gateway that has the key
    finally:
        second.stop()


def is_as_wide(page: Any, width: int) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth") <= width)


def test_names_and_labels_that_mean_harm_are_text(tab: Tab, world: World) -> None:
    """Job, role and node names of this kind are refused; see tests/unit/master/core/test_client_requests.py."""
    role = RoleSpec(
        name="worker",
        kind="simple",
        entry_point=EntryPoint(kind="module", target="x"),
        resources=Resources(accelerator=99),  # so that it waits
    )
    labels = dict.fromkeys(HOSTILE_NAMES, LINK)
    spec = JobSpec(name="labelled", roles=[role], labels=labels, submitted_by=MARKUP)
    with running(world.cluster, spec) as handle:
        for path, element in (
            ("/jobs/train-1", ".role-row .numbers"),
            ("/jobs/train-1/metrics", ".chart"),
            (f"/jobs/{handle.job_id}", ".facts"),
            ("/jobs", ".table-body a"),
        ):
            page = tab.open(path, element)
            tab.eventually_has(MARKUP)
            for width in (1440, 390):
                page.set_viewport_size({"width": width, "height": 900})
                eventually(functools.partial(is_as_wide, page, width), timeout=met(100), message=f"{path} is too wide")
            assert not page.evaluate("document.querySelectorAll('main img, main script').length"), path
            assert page.title().endswith("Unified"), path
            text = tab.text()
            assert not re.search(r"[\u202e\x1b\x07]", text), path
            if path.endswith(("metrics", handle.job_id)):
                assert r"\u202egnp.exe" in text, path
                assert r"\e]8;;javascript:" in text, path


def test_a_line_of_ten_megabytes_does_not_stop_the_page(tab: Tab, world: World) -> None:
    flood = DLJobBuilder().node_num(1).device_per_node(1).role("worker").run("page_jobs.flood").build()
    with running(world.cluster, flood, "flood") as handle:
        page = tab.open(f"/jobs/{handle.job_id}/logs?worker=worker-0", ".line")
        tab.eventually_has("yyyy", ".lines")
        page.click("button:has-text('from the start')")
        tab.eventually_has("more characters", ".lines")
        assert page.evaluate("document.querySelectorAll('*').length") < MAX_ELEMENTS
        assert page.evaluate("document.querySelector('main').textContent.length") < 200_000
        handle.stop()
        tab.eventually_has("the end", ".lines")


def test_lines_of_several_roles_are_in_the_order_of_time(tab: Tab, world: World) -> None:
    builder = DLJobBuilder().node_num(1).device_per_node(2).device_type("CPU")
    for role in ("actor", "learner"):
        builder = builder.role(role).run("page_jobs.tell_time").total(1).end()
    with running(world.cluster, builder.build(), "clocks") as handle:
        handle.wait(timeout=met(200))
        page = tab.open(f"/jobs/{handle.job_id}/logs", ".line")
        page.click("button:has-text('wrap')")
        tab.eventually_has("40 lines", ".log-count")
        page.locator(".lines").evaluate("(lines) => { lines.style.height = '900px'; }")
        eventually(lambda: page.locator(".line").count() == 40, timeout=met(100))
        lines = page.locator(".line").all_inner_texts()
        printed = [float(line.split()[-1]) for line in lines]
        late = [at - after for at, after in itertools.pairwise(printed) if after < at]
        assert max(late, default=0) < 1, "times are those at which the agent read the lines"
        assert {line.split()[0] for line in lines[:10]} == {"actor-0", "learner-0"}
        assert not page.locator(".line .at").count()
        with page.expect_response(lambda answer: "max_bytes=1048576" in answer.url):
            page.click("button:has-text('from the start')")
        tab.eventually_has("40 lines", ".log-count")
        page.click("button:has-text('times')")
        eventually(lambda: page.locator(".line .at").count() == 40, timeout=met(100))
        for shown, at in zip(page.locator(".line .at").all_inner_texts(), printed, strict=True):
            seconds = at % 60 - float(shown.rpartition(":")[2])  # the page is in the browser's zone
            assert abs((seconds + 30) % 60 - 30) < 1, (shown, at)


def test_a_page_of_another_site_can_do_nothing(tab: Tab, world: World, tmp_path: Path) -> None:
    """It is on this host, too, so that the browser sends the cookie along: ports make no site of their own."""
    tab.expected.append("")  # the browser says each refusal
    (tmp_path / "index.html").write_text(
        f"<iframe src='{tab.origin}/jobs/train-1'></iframe><form method='post' enctype='text/plain'"
        f" action='{tab.origin}/page/jobs/train-1/stop'><button>win</button></form>"
    )
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        evil = f"http://127.0.0.1:{server.server_port}"
        tab.page.context.route(f"{evil}/**", lambda route: route.continue_())
        page = tab.page
        page.goto(evil)
        frame = page.frames[1]
        assert frame.evaluate("document.querySelector('main') === null")
        for options in ("{}", "{headers: {'X-Unified': '1'}}", "{method: 'POST', mode: 'no-cors'}"):
            code = (
                "(url) => fetch(url, {credentials: 'include', ...%s}).then((answer) => answer.status, () => 'refused')"
            )
            for path in ("about", "jobs/train-1/stop"):
                assert page.evaluate(code % options, f"{tab.origin}/page/{path}") in ("refused", 0)
        with page.expect_navigation():
            page.click("button")
        assert '"error"' in page.inner_text("body")
        server.shutdown()
    assert world.cluster.status("train-1").stage == "RUNNING"
    assert "asked on the page" not in world.cluster.status("train-1").reason
