"""A sender and receivers for each test, and for each route."""

from tests.support.bus import pool, world  # noqa: F401 - fixtures
from tests.support.weights import cast  # noqa: F401 - a fixture
