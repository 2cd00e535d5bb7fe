"""The page of a job that stalls: what says so, and what the job's queues and processes stand at meanwhile."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.conftest import OpenTab, Ui, cluster_with_key
from unified.api.builder import DLJobBuilder

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


def test_a_job_that_stalls_is_red_everywhere_and_its_queues_say_why(open_tab: OpenTab, tmp_path: Path) -> None:
    builder = DLJobBuilder().node_num(1).device_per_node(4).device_type("CPU")
    described = builder.role("trainer").run("stall_jobs.train").total(1).end().build()
    with cluster_with_key(tmp_path, nodes=1) as cluster, contextlib.ExitStack() as stack:
        handle = cluster.submit(described, "rl")
        ui = Ui(cluster.address)
        stack.callback(ui.stop)
        tab = open_tab(ui.origin)
        tab.page.goto(ui.url)
        tab.eventually_has("RUNNING", ".job-list")
        tab.eventually_has("no step for", ".job-list")
        assert "STALLED" in tab.text(".job-list .state.tone-bad")
        assert " left" not in tab.text(".job-list")
        tab.eventually_has("stalled", ".attention")
        assert "no step" in tab.text(".attention")
        tab.page.click(".job-list a:has-text('rl-1')")
        tab.eventually_has("for an item")
        assert "STALLED" in tab.text(".job-head h1")
        assert "no step for" in tab.text(".job-head")
        assert tab.text("p.reason") == "trainer-0 for an item of rollouts"
        assert "all workers run" not in tab.text()
        tab.eventually_has("trainer-0 for an item", "[aria-label=queues] tr:nth-child(2) td:nth-child(2)")
        assert "3 of 8" in tab.text("[aria-label=queues]")
        tab.page.click(".tabs a:has-text('Workers')")
        tab.eventually_has("cores")
        assert " MB" in tab.text()
        unified = str(Path(sys.executable).with_name("unified"))
        status = subprocess.run(
            [unified, "status", handle.job_id, "--master", cluster.address], capture_output=True, text=True, check=True
        ).stdout
        assert f"job {handle.job_id} is STALLED, no step for " in status
        listed = subprocess.run(
            [unified, "jobs", "--master", cluster.address], capture_output=True, text=True, check=True
        ).stdout
        assert "STALLED" in listed
        assert "no step since" in listed
        whole_node = builder.role("other").run("stall_jobs.train").total(4).resource(accelerator=1).end().build()
        others = [cluster.submit(whole_node, f"other-{number}") for number in range(3)]
        tab.page.goto(ui.origin)
        tab.eventually_has("number 2 in the queue, waits", "[aria-label='Waiting jobs']")
        running = tab.text("[aria-label='Running jobs']")
        assert handle.job_id in running
        assert [each.job_id in running for each in others] == [True, False, False]
        tab.page.click(f"[aria-label='Waiting jobs'] a:has-text('{others[2].job_id}')")
        tab.page.click("a:has-text('its place in the queue')")
        tab.eventually_has("number 2 in the queue, waits", "[aria-label='Waiting jobs']")
        for each in [*others, handle]:
            each.stop(force=True)
