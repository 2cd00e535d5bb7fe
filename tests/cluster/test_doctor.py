"""`unified doctor` between hosts, which are network namespaces: a healthy cluster, and one with a blocked way."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts import Hosts

pytestmark = [pytest.mark.netns, pytest.mark.timeout(300)]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(tmp_path, 3, {"UNIFIED_PORT_RANGE": "20000-20999"}).up() as hosts:
        yield hosts


def examine(hosts: Hosts, on: int, master: str = "") -> dict[str, Any]:
    """Return the findings about the cluster, by check."""
    words = ["-m", "unified", "doctor", "--json", "--master", master or hosts.master]
    enter = ["nsenter", f"--net=/run/netns/{hosts.namespace(on)}", sys.executable]
    done = subprocess.run([*enter, *words], env=hosts._env(on), capture_output=True, text=True, timeout=120)
    found = {each["check"]: each for each in json.loads(done.stdout)}
    return {
        check: found[check] for check in ("master", "clock", "own address", "ports", "other nodes") if check in found
    }


def test_what_is_found_between_hosts(hosts: Hosts) -> None:
    for number in range(3):
        found = examine(hosts, number)
        assert {check: each["severity"] for check, each in found.items()} == {
            "master": "fine",
            "clock": "fine",
            "own address": "fine",
            "ports": "fine",
            "other nodes": "untested",
        }, found
        assert f"{hosts.subnet}.{10 + number}" in found["own address"]["what"]
        assert ("2 of 2 nodes" if number == 0 else "1 of 1 nodes") in found["ports"]["what"]

    hosts.ip("-n", hosts.namespace(1), "route", "add", "blackhole", f"{hosts.subnet}.12/32")
    for number, other in ((1, 2), (2, 1)):  # answers do not come through either
        found = examine(hosts, number)
        assert [check for check, each in found.items() if each["severity"] == "wrong"] == ["ports"]
        assert f"1 of 1 nodes on other hosts: node h{other} (" in found["ports"]["what"]
    assert examine(hosts, 0)["ports"]["severity"] == "fine"
