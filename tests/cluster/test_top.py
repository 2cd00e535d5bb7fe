"""``unified top`` on a terminal and in a pipe."""

import contextlib
import os
import pty
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.support.deadlines import met
from unified.testing import LocalCluster, eventually

pytestmark = pytest.mark.processes


def test_top_on_a_terminal_takes_keys_and_gives_the_terminal_back(local_cluster: Callable[..., LocalCluster]) -> None:
    cluster = local_cluster()
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "unified", "top", "--master", cluster.address]
    shown = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    os.set_blocking(ours, False)
    text = bytearray()

    def has(words: bytes) -> bool:
        with contextlib.suppress(OSError):
            text.extend(os.read(ours, 1 << 16))
        return words in text

    eventually(lambda: has(b"no jobs"), timeout=100, message=text.decode())
    assert has(b"2 ALIVE")
    os.write(ours, b"n")
    eventually(lambda: has(b"node-2"), timeout=100, message=text.decode())
    os.write(ours, b"q")
    eventually(lambda: has(b"\x1b[?1049l"), timeout=100, message="the screen is not given back")
    assert shown.wait(met(100)) == 0
    os.close(ours)


def test_top_without_a_terminal_prints_once_or_says_so(local_cluster: Callable[..., LocalCluster]) -> None:
    cluster = local_cluster(nodes=1)

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "unified", "top", "--master", cluster.address, *words]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100)

    assert "nodes: 1 ALIVE" in run("--once").stdout
    refused = run()
    assert (refused.returncode, "say --once" in refused.stderr) == (2, True)
