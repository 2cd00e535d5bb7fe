"""A real browser, a real cluster with a key, and `unified ui` before it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.deadlines import met
from tests.support.packages import install
from unified.api.builder import DLJobBuilder
from unified.security.curve import new_key
from unified.security.keys import write_key
from unified.testing import LocalCluster, eventually

sync_api = pytest.importorskip("playwright.sync_api", reason="`make test-browser` installs playwright")

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests/support/programs"
PICTURES = ROOT / "out/browser"
NODE_MODULES = ROOT / "scripts/vendor/node_modules"
NO_NPM = "npm's packages are not here: `make test-browser` installs them where it reaches npm's registry"
BROWSERS = ("/usr/bin/chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WITHIN_MS = 1000 * met(100)
MAX_ELEMENTS = 1500


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    found = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if found is None:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            pytest.skip("no Chromium is here, and only root can install it, by apt")
        if why := install(["chromium-headless-shell"]):
            pytest.skip(f"Chromium cannot be installed: {why}")
        found = BROWSERS[0]
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


class Ui:
    """`unified ui` as a user starts it."""

    def __init__(self, address: str, *options: str) -> None:
        words = [str(Path(sys.executable).with_name("unified")), "ui", "--master", address, *options]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        told = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/#ticket=\S+", told)
        if not found:
            self.stop()
        assert found, told
        self.url, self.port = found[0], found[1]
        self.origin = f"http://127.0.0.1:{self.port}"

    def stop(self, sig: int = signal.SIGTERM) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            self.process.send_signal(sig)
            self.process.wait(met(100))


class World(NamedTuple):
    """The cluster of these tests: `train` goes on for long and prints what could do harm, `broken` has failed."""

    cluster: LocalCluster
    ui: Ui


@contextlib.contextmanager
def cluster_with_key(home: Path, nodes: int = 3) -> Iterator[LocalCluster]:
    """A cluster of nodes with four devices each, which `unified ui` finds the key of; nothing is left of it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        write_key(home / "keys/cluster.key", new_key())
        monkeypatch.setenv("UNIFIED_KEY_FILE", str(home / "keys/cluster.key"))
        monkeypatch.syspath_prepend(str(PROGRAMS))
        cluster = LocalCluster(nodes, 4, home=home / "cluster")
        try:
            yield cluster.start()
        finally:
            left = cluster.stop()
    assert not left, left


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with cluster_with_key(tmp_path_factory.mktemp("page")) as cluster:
        Tab.suffix = cluster.submit(job("page_jobs.train"), "train").job_id.rpartition("-")[2]
        broken = cluster.submit(job("page_jobs.fail", max_restart=1), "broken")
        assert broken.wait(timeout=met(200)) == 1
        ui = Ui(cluster.address)
        try:
            yield World(cluster, ui)
        finally:
            ui.stop()


def job(entry: str, max_restart: int = 3) -> Any:
    """An elastic job of four ranks on two nodes."""
    builder = DLJobBuilder().node_num(2).device_per_node(4).device_type("CPU")
    return builder.train(entry).nnodes(2).nproc_per_node(2).max_restart(max_restart).end().build()


class Tab:
    """A tab of the browser that notes all that should not be: messages, requests to others, wrong titles."""

    suffix = ""
    """End of the ids of all jobs of the cluster."""

    def __init__(self, context: Any, origin: str) -> None:
        self.faults: list[str] = []
        self.expected: list[str] = []
        """Parts of messages that a test causes on purpose."""
        self.origin = origin
        self.page = context.new_page()
        self.page.set_default_timeout(WITHIN_MS)
        self.page.on("console", lambda message: self.faults.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        context.route(lambda url: not url.startswith(origin), self._refuse)

    def _refuse(self, route: Any) -> None:
        self.faults.append(f"asked {route.request.url}")
        route.abort()

    def open(self, path: str = "/", wait_for: str = "main h1") -> Any:
        """Go to a path; return the page once an element is there."""
        self.page.goto(self.origin + self.whole(path))
        self.page.wait_for_selector(wait_for, state="attached")
        return self.page

    def whole(self, path: str) -> str:
        """Return a path in which a job has no suffix (`/jobs/train-1/why`) with the suffix."""
        return re.sub(r"(?<=^/jobs/)[a-z]+-\d(?=$|[/?])", rf"\g<0>-{self.suffix}", path)

    def text(self, selector: str = "main") -> str:
        return str(self.page.inner_text(selector))

    def eventually_has(self, text: str, selector: str = "main") -> None:
        """Wait until a text is shown. The page's policy refuses playwright's own way, which evaluates a string."""
        eventually(lambda: text in self.text(selector), timeout=met(100), message=f"{text!r} is not shown")

    def unexpected(self) -> list[str]:
        return [fault for fault in self.faults if not any(part in fault for part in self.expected)]


@pytest.fixture(scope="session")
def state(browser: Any, world: World) -> dict[str, Any]:
    """Cookies of a browser that has signed in by the URL of `unified ui`, which works once."""
    with contextlib.closing(browser.new_context()) as context:
        tab = Tab(context, world.ui.origin)
        tab.page.goto(world.ui.url)
        tab.page.wait_for_selector(".strip")
        assert "ticket" not in tab.page.url
        assert tab.unexpected() == []
        kept: dict[str, Any] = context.storage_state()
    assert [cookie["httpOnly"] for cookie in kept["cookies"]] == [True]
    return kept


OpenTab = Callable[..., Tab]


@pytest.fixture
def open_tab(browser: Any, request: pytest.FixtureRequest) -> Iterator[OpenTab]:
    """Opens tabs, each of a browser of its own. A test that fails leaves a picture of each in out/browser."""
    tabs: list[Tab] = []
    with contextlib.ExitStack() as stack:

        def open_one(origin: str, **options: Any) -> Tab:
            context = stack.enter_context(contextlib.closing(browser.new_context(reduced_motion="reduce", **options)))
            tabs.append(Tab(context, origin))
            return tabs[-1]

        failed = request.session.testsfailed
        yield open_one
        faults = [fault for tab in tabs for fault in tab.unexpected()]
        if faults or request.session.testsfailed != failed:
            PICTURES.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"\W+", "-", request.node.name).strip("-")
            for number, tab in enumerate(tabs):
                tab.page.screenshot(path=str(PICTURES / f"{name}{number or ''}.png"), full_page=True)
        assert not faults, faults


@pytest.fixture
def tab(open_tab: OpenTab, world: World, state: dict[str, Any]) -> Tab:
    """A tab that is signed in."""
    return open_tab(world.ui.origin, storage_state=state)
