"""A world of workers with queues, for each route."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.queue_members import Member, QueueWorld
from unified.testing import eventually


@pytest.fixture(params=["auto", "tcp", "relay"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, relay: str) -> Iterator[QueueWorld]:
    """Queues work the same on every route."""
    run_dir: Path = tmp_path_factory.mktemp("q") / "run"
    run_dir.mkdir()
    before = set(threading.enumerate())
    world = QueueWorld(run_dir, request.param, relay)
    yield world
    world.close()
    assert eventually(lambda: not _new_since(before), message=f"left: {_new_since(before)}")


@pytest.fixture
def trio(world: QueueWorld) -> tuple[Member, Member, Member]:
    a, b, c = (world.worker(name) for name in "abc")
    return a, b, c


def _new_since(before: set[threading.Thread]) -> list[threading.Thread]:
    """But for those of the process, which end with it."""
    kept = {"queue-cleanup", "bus-retry"}
    new = [thread for thread in threading.enumerate() if thread not in before and thread.name not in kept]
    return [thread for thread in new if thread.name.startswith(("bus-", "queue-"))]
