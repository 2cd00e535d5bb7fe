"""A world for each test, and for each route; shared memory for a test."""

import gc
import os
import tempfile
from collections.abc import Iterator

import pytest

from tests.support.bus import pool, world  # noqa: F401 - fixtures
from tests.support.shared_memory import Side
from unified.bus.shm.files import Sweeper


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
    side = Side(directory, "owner")
    yield side
    side.pool.close()


@pytest.fixture
def no_segment_left(directory: str, owner: Side, request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything is given back after a test, but for what it left on its way to the module's `LEFT_TO`."""
    yield
    for inbox_id in ("owner", *getattr(request.module, "LEFT_TO", ())):
        owner.pool.forget(inbox_id)
    owner.pool.close()
    if os.listdir(directory):
        gc.collect()  # an error that was expected still knows what it was about
    Sweeper(directory).sweep(0.0, 0.0, is_last=True)  # what processes left that a test killed
    assert not os.listdir(directory), "a segment was left"
