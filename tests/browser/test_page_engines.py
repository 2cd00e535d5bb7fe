"""The page of a job with an engine: the engine's state, and what its worker reports of it."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

import pytest

from tests.browser.conftest import PROGRAMS, OpenTab, Ui, cluster_with_key
from unified.api.builder import DLJobBuilder

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


def test_an_engine_has_its_requests_tokens_and_weights_on_the_page(open_tab: OpenTab, tmp_path: Path) -> None:
    vllm = tmp_path / "vllm"
    vllm.write_text(f"#!{sys.executable}\n{(PROGRAMS / 'fake_vllm.py').read_text()}")
    vllm.chmod(0o755)
    builder = DLJobBuilder().node_num(1).device_per_node(4).device_type("CPU")
    builder.role("trainer").run("page_jobs.send_weights")
    builder.role("rollout").engine(f"{vllm} serve a/model --port {{port}}")
    with cluster_with_key(tmp_path, nodes=1) as cluster, contextlib.ExitStack() as stack:
        handle = cluster.submit(builder.build(), "rl")
        ui = Ui(cluster.address)
        stack.callback(ui.stop)
        tab = open_tab(ui.origin, viewport={"width": 1920, "height": 1080})
        tab.page.goto(ui.url)
        tab.page.click(".job-list a:has-text('rl-1')")
        tab.page.click(".tabs a:has-text('Workers')")
        for text in ("weights 7", "requests 3", "tokens_per_s"):
            tab.eventually_has(text)
        (row,) = (line for line in tab.page.locator("[role=row]").all_inner_texts() if "rollout-0" in line)
        assert "SERVING" in row
        assert re.search(r"tokens_per_s [1-9]", row), row
        handle.stop(force=True)
