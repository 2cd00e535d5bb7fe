"""Fixtures for tests of the gateway."""

from tests.support.grpc_client import generated  # noqa: F401 - a fixture
