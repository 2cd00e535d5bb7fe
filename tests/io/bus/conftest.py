"""A world for each test, and for each route."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.io.bus.world import World
from unified.testing import eventually
from unified_master.relay import BusRelay


@pytest.fixture
def relay() -> Iterator[str]:
    relay = BusRelay("tcp://127.0.0.1:0")
    yield relay.start()
    relay.close()


@pytest.fixture(params=["auto", "tcp", "relay"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, relay: str) -> Iterator[World]:
    """Everything on the bus works the same on every route."""
    run_dir: Path = tmp_path_factory.mktemp("b")
    before = set(threading.enumerate())
    world = World(run_dir, request.param, relay)
    yield world
    world.close()
    assert not list(run_dir.iterdir()), "an inbox left its socket behind"
    assert eventually(lambda: not _new_since(before), message="a thread of the bus is left")


def _new_since(before: set[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("bus-")]
