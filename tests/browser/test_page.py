"""The page as a user sees it: every view of a cluster with a job that runs and one that failed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import MAX_ELEMENTS, NO_NPM, NODE_MODULES, OpenTab, Tab, Ui, World, job
from tests.support.deadlines import met
from tests.support.programs.page_jobs import MARKUP
from unified.testing import eventually
from unified_agent.measure.profiles import find_program

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

VIEWS = {
    "/": ".strip",
    "/jobs": ".table",
    "/jobs/train-1": ".grid canvas",
    "/jobs/broken-2": ".root-cause",
    "/jobs/train-1?by=lag": ".ramp",
    "/jobs/train-1/timeline": ".timeline canvas",
    "/jobs/train-1/metrics": ".chart",
    "/jobs/train-1/workers": ".table",
    "/jobs/broken-2/workers?worker=ELASTIC_4-1_2-1": ".decisions",
    "/jobs/train-1/logs": ".line",
    "/jobs/train-1/data": ".empty",
    "/jobs/broken-2/why": ".decisions",
    "/jobs/train-1/stacks": ".empty",
    "/nodes": ".table",
    "/nodes/node-1": ".devices",
    "/datasets": ".empty",
    "/tasks": ".empty",
    "/logs": ".log-jobs",
    "/about": ".licences",
    "/jobs/nothing": ".empty",
}
AXE = NODE_MODULES / "axe-core/axe.min.js"


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_in_both_schemes_and_sizes(tab: Tab, scheme: str, width: int) -> None:
    tab.page.emulate_media(color_scheme=scheme)
    tab.page.set_viewport_size({"width": width, "height": 900})
    for path, element in VIEWS.items():
        page = tab.open(path, element)
        assert page.title().endswith("Unified"), path
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        assert page.evaluate("document.querySelectorAll('*').length") < MAX_ELEMENTS, path
        assert not page.evaluate("document.querySelectorAll('main img, main script').length"), path


@pytest.mark.skipif(not AXE.exists(), reason=NO_NPM)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_serious_finding_of_axe(open_tab: OpenTab, state: dict[str, Any], world: World, scheme: str) -> None:
    tab = open_tab(world.ui.origin, storage_state=state, color_scheme=scheme, bypass_csp=True)
    found = {}
    for path, element in VIEWS.items():
        page = tab.open(path, element)
        page.add_script_tag(content=AXE.read_text())
        for each in page.evaluate("axe.run().then((result) => result.violations)"):
            if each["impact"] in ("serious", "critical"):
                nodes = [f"{node['html'][:150]} {node['failureSummary'][:300]}" for node in each["nodes"][:3]]
                found[f"{path} {each['id']}"] = nodes
    assert found == {}


def test_the_root_cause_is_named_where_one_looks_first(tab: Tab) -> None:
    tab.open("/", ".attention li a")
    line = tab.text(".attention")
    assert "failed" in line
    assert "ELASTIC_4-1_2-1 on node-" in line
    assert f"ValueError: {MARKUP} is no sample" in line
    tab.page.click(".attention li a:has-text('broken-2')")
    tab.page.wait_for_selector(".root-cause")
    card = tab.text(".root-cause")
    assert "ELASTIC-1 on node-" in card
    assert "collateral" in card
    assert "raise ValueError" in tab.text(".traceback")
    assert "F" in tab.page.locator(".legend .cell").all_inner_texts()


def test_logs_follow_and_do_no_harm(tab: Tab) -> None:
    tab.open("/jobs/train-1/logs?worker=ELASTIC-0", ".line")
    tab.eventually_has("step ", ".lines")
    last = tab.page.locator(".line").last.inner_text()
    eventually(lambda: tab.page.locator(".line").last.inner_text() != last, timeout=met(100))
    tab.page.fill("input.search", "img")
    tab.eventually_has(MARKUP, ".lines")
    line = next(text for text in tab.page.locator(".line").all_inner_texts() if MARKUP in text)
    assert "a link" in line
    assert "\\u202egnp.exe" in line
    assert "nul\\x00end" in line
    assert tab.page.locator(".line .fg-1").first.inner_text() == "red"
    assert tab.page.locator(".lines a").count() == 0
    tab.page.fill("input.search", "not UTF-8")
    tab.eventually_has("\ufffd", ".lines")
    tab.page.fill("input.search", "long long")
    tab.eventually_has("more characters", ".lines")
    assert tab.page.title() == f"train-1-{tab.suffix}, logs · Unified"


def test_a_log_is_downloaded_whole(tab: Tab, tmp_path: Path) -> None:
    tab.open("/jobs/broken-2/logs?worker=ELASTIC-1&incarnation=1", ".line")
    with tab.page.expect_download() as download:
        tab.page.click("text=download")
    assert download.value.suggested_filename == f"broken-2-{tab.suffix}-ELASTIC-1.log"
    download.value.save_as(tmp_path / "log")
    assert "ValueError" in (tmp_path / "log").read_text()


def test_stacks_are_taken(tab: Tab) -> None:
    tab.open("/jobs/train-1/stacks")
    tab.page.click("text=Take stacks")
    tab.page.wait_for_selector(".stack")
    groups = re.findall(r"(\d+) workers? MainThread", tab.text(".stacks"))
    assert sum(map(int, groups)) == 4, groups  # one may work while the others sleep
    assert "in train" in tab.text(".stacks")


@pytest.mark.skipif(find_program("py-spy") is None, reason="needs py-spy, of the extra debug")
def test_a_flame_graph_is_shown_and_downloaded(tab: Tab, tmp_path: Path) -> None:
    tab.open("/jobs/train-1/stacks?rank=1", ".stack")
    tab.page.click("text=Profile 10 s")
    picture = tab.page.locator(".flame img")
    assert picture.evaluate("async (image) => (await image.decode(), image.naturalWidth)") > 100
    with tab.page.expect_download() as download:
        tab.page.click("text=Download, to zoom")
    assert download.value.suggested_filename == f"train-1-{tab.suffix}-ELASTIC-1.svg"
    download.value.save_as(tmp_path / "graph")
    assert "train (page_jobs.py" in (tmp_path / "graph").read_text()


def test_filters_are_in_the_address(tab: Tab) -> None:
    tab.open("/jobs", ".table")
    tab.page.fill("input.search", "brok")
    tab.eventually_has("1 of ")
    assert tab.page.url.endswith("/jobs?text=brok")
    tab.page.reload()
    tab.page.wait_for_selector(".table-body a:has-text('broken-2')")
    assert "train-1" not in tab.text(".table-body")


def test_the_keyboard_is_enough(tab: Tab) -> None:
    page = tab.open("/jobs", ".table-body a")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    page.locator(".table").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector(".tabs")
    page.locator(".grid canvas").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".tip")
    assert "ELASTIC-0" in page.locator(".grid canvas").get_attribute("aria-label")
    page.keyboard.press("Enter")
    page.wait_for_selector(".tabs a[aria-current]:has-text('Workers')")
    assert "worker=ELASTIC" in page.url


def press(tab: Tab, selector: str) -> None:
    """Reach an element by the Tab key alone, and press Enter on it."""
    page = tab.page
    for _ in range(100):
        page.keyboard.press("Tab")
        if page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            page.keyboard.press("Enter")
            return
    raise AssertionError(f"the keyboard does not get to {selector}")


def test_the_whole_tour_by_the_keyboard(tab: Tab) -> None:
    page = tab.open("/", ".strip")
    for path, element in VIEWS.items():
        if path.count("/") == 1 and "?" not in path:
            press(tab, f"nav[aria-label=Pages] a[href='{path}']")
            page.wait_for_selector(f"nav[aria-label=Pages] a[aria-current][href='{path}']")
            page.wait_for_selector(element, state="attached")
    press(tab, "nav[aria-label=Pages] a[href='/jobs']")
    page.wait_for_selector(".table-body a")
    press(tab, ".table-body a[href^='/jobs/train-1-']")
    page.wait_for_selector(".tabs")
    for path, element in VIEWS.items():
        if path.startswith("/jobs/train-1/"):
            press(tab, f".tabs a[href='{tab.whole(path)}']")
            page.wait_for_selector(f".tabs a[aria-current][href='{tab.whole(path)}']")
            page.wait_for_selector(element, state="attached")
    press(tab, ".actions button:last-child")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog[open]", state="detached")


def test_a_job_is_stopped_by_its_button_after_a_question(tab: Tab, world: World) -> None:
    handle = world.cluster.submit(job("page_jobs.train"), "stopped")
    tab.open(f"/jobs/{handle.job_id}", "button:has-text('Stop')")
    tab.page.click(".actions button:has-text('Stop')")
    tab.page.click("dialog button:has-text('Cancel')")
    assert world.cluster.status(handle.job_id).stage != "STOPPING"
    tab.page.click(".actions button:has-text('Stop')")
    tab.page.click("dialog button:has-text('Stop the job')")
    tab.eventually_has("STOPPED")
    assert handle.wait(timeout=met(200)) == 130
    assert "asked on the page by" in world.cluster.status(handle.job_id).reason


def test_who_may_only_look_cannot_press(open_tab: OpenTab, world: World) -> None:
    ui = Ui(world.cluster.address, "--read-only")
    try:
        tab = open_tab(ui.origin)
        tab.page.goto(ui.url)
        tab.page.wait_for_selector(".strip")
        tab.open("/jobs/train-1", ".actions")
        assert tab.page.locator(".actions button:enabled").count() == 0
        assert tab.unexpected() == []
    finally:
        ui.stop()


def test_without_a_session_the_page_says_what_to_run(open_tab: OpenTab, world: World, state: dict[str, Any]) -> None:
    assert state  # the ticket was used
    tab = open_tab(world.ui.origin)
    tab.expected.append("401")
    tab.page.goto(world.ui.url)
    tab.eventually_has("unified ui", "body")
    tab.eventually_has("used before", "body")
    assert "ticket=" not in tab.page.url


def test_the_page_asks_again_and_again_where_a_proxy_holds_streams_back(tab: Tab, world: World) -> None:
    held = []
    tab.page.route(
        "**/page/stream?*", lambda route: route.continue_() if "poll=1" in route.request.url else held.append(route)
    )
    tab.open("/", ".strip")
    assert held
    handle = world.cluster.submit(job("page_jobs.train"), "polled")
    tab.eventually_has(handle.job_id)
    handle.stop(force=True)
    for route in held:
        route.abort()
