"""A world for each test, and for each route; shared memory for a test."""

import os
import tempfile
from collections.abc import Iterator

import pytest

from tests.support.bus import pool, world  # noqa: F401 - fixtures
from tests.support.shared_memory import Side


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
