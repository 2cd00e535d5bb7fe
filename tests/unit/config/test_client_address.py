"""Addresses of masters, as people write them."""

from __future__ import annotations

import pytest

from unified.config.addresses import find_master, parse_address, require_master
from unified.errors import UsageError


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://10.0.0.1:5000", "tcp://10.0.0.1:5000"),
        ("host-1.example:80", "tcp://host-1.example:80"),
        ("localhost", "tcp://localhost:7077"),
        ("tcp://[::1]:9", "tcp://[::1]:9"),
    ],
)
def test_an_address_may_be_short(text: str, address: str) -> None:
    assert parse_address(text) == address


def test_an_argument_wins_over_the_environment() -> None:
    env = {"UNIFIED_MASTER": "a:1"}
    assert find_master("b:2", env) == "tcp://b:2"
    assert find_master(None, env) == "tcp://a:1"
    assert find_master(None, {"UNIFIED_MASTER": ""}) is None


def test_without_an_address_the_error_says_how_to_give_one() -> None:
    with pytest.raises(UsageError, match=r"--master tcp://HOST:PORT.*UNIFIED_MASTER"):
        require_master(None, {})
