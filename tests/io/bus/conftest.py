"""A world for each test, and for each route; shared memory for a test."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.io.bus.shm_peer import Side
from tests.io.bus.weights_world import Cast
from tests.io.bus.world import World
from unified.testing import eventually


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


@pytest.fixture
def cast(world: World) -> Iterator[Cast]:
    cast = Cast(world)
    yield cast
    cast.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def directory() -> Iterator[str]:
    """For segments: a folder in shared memory, kept open so that a test beside this one sees that it is in use."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-") as path:
        number = os.open(path, os.O_RDONLY)
        try:
            yield path
        finally:
            os.close(number)


@pytest.fixture
def owner(directory: str) -> Iterator[Side]:
    """A process with a pool: this one."""
    side = Side(directory, "owner")
    yield side
    side.pool.close()
