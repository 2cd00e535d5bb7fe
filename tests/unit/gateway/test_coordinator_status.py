"""Every refusal of the coordinator has a gRPC status that was chosen for it."""

import re
from pathlib import Path
from typing import get_args

import grpc
import pytest

import unified.coordinator.core
from unified.errors import (
    CoordinatorError,
    DataFileNotFoundError,
    DatasetError,
    KeyRefusedError,
    MasterUnreachableError,
    ProtocolError,
    StorageDeniedError,
    UsageError,
)
from unified.protocol.coordinator import ReleasedBy
from unified_gateway.coordinator_grpc import STATUS_OF_CODE, status_of

CORE = Path(unified.coordinator.core.__file__).parent
OF_OTHER_REQUESTS = {"world-unknown"}
"""Codes of requests that no call of the service makes."""


def test_all_codes_of_the_core_are_in_the_table() -> None:
    found = {
        code for file in CORE.glob("*.py") for code in re.findall(r'RefusedError\(\s*"([a-z-]+)"', file.read_text())
    }
    assert len(found) > 4
    assert found | {*get_args(ReleasedBy)} - {"arrived"} <= STATUS_OF_CODE.keys() | OF_OTHER_REQUESTS


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CoordinatorError("no", code="not-found"), "NOT_FOUND"),
        (CoordinatorError("no", code="of-a-later-release"), "FAILED_PRECONDITION"),
        (CoordinatorError("another class"), "INTERNAL"),
        (MasterUnreachableError("away"), "UNAVAILABLE"),
        (KeyRefusedError("key"), "INTERNAL"),
        (ProtocolError("no master"), "INTERNAL"),
        (UsageError("what"), "INVALID_ARGUMENT"),
        (DatasetError("not csv"), "INVALID_ARGUMENT"),
        (DataFileNotFoundError("where"), "NOT_FOUND"),
        (StorageDeniedError("who"), "FAILED_PRECONDITION"),
        (PermissionError("who"), "FAILED_PRECONDITION"),
        (TimeoutError("late"), "DEADLINE_EXCEEDED"),
        (ImportError("pip install"), "FAILED_PRECONDITION"),
    ],
)
def test_errors_have_the_status_of_their_kind(error: Exception, status: str) -> None:
    assert status_of(error) is grpc.StatusCode[status]
