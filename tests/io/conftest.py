"""Fixtures for tests of one shell on real sockets."""

from collections.abc import Iterator

import pytest

from tests.support.fake_master import fake_master, job  # noqa: F401 - fixtures
from tests.support.fake_nvml import fake_nvml  # noqa: F401 - a fixture
from tests.support.full_disk import small_disk  # noqa: F401 - a fixture
from tests.support.gateway_process import start_gateway  # noqa: F401 - a fixture
from tests.support.master_process import start_master  # noqa: F401 - a fixture
from tests.support.s3 import bucket, s3_environment, s3_server  # noqa: F401 - fixtures, one server for the whole session
from unified_master.relay import BusRelay


@pytest.fixture
def relay() -> Iterator[str]:
    relay = BusRelay("tcp://127.0.0.1:0")
    yield relay.start()
    relay.close()
