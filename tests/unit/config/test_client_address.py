"""Addresses as people write them."""

from __future__ import annotations

import pytest

from unified.config.addresses import find_master, parse_address, parse_flag, require_master, split_address
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


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("a", "a", None),
        ("GPU-1.example:0", "GPU-1.example", 0),
        ("tcp://10.0.0.1:65535/", "10.0.0.1", 65535),
        ("[fe80::1%eth0]:9", "[fe80::1%eth0]", 9),
        ("[::]", "[::]", None),
        ("*:7077", "*", 7077),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, host: str, port: int | None) -> None:
    assert split_address(text) == (host, port)
    assert split_address(text).bare_host == host.strip("[]")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            ":1",
            "a:",
            "a:b",
            "a:1:2",
            "a:-1",
            "a b:1",
            "a\n:1",
            "::1",
            "[::1",
            "[::g]:1",
            "[::1]x:1",
            "[10.0.0.1]:1",
        ),
        *("u@a:1", "a:1/path", "a:1?q", "a:1#f", "tcp://", "udp://a:1", "tcp:a:1", "a:65536"),
    ],
)
def test_texts_that_are_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"host:port is expected|a port is at most"):
        split_address(text)


def test_a_flag_of_a_daemon_names_a_port() -> None:
    assert parse_flag("--bind", "tcp://*:0").url == "tcp://*:0"
    for text in ("a", "tcp://a:b"):
        with pytest.raises(UsageError, match=rf"--bind '{text}' is not an address: write tcp://HOST:PORT"):
            parse_flag("--bind", text)


@pytest.mark.parametrize("text", ["*:7077", "a:0"])
def test_a_master_cannot_be_reached_at(text: str) -> None:
    with pytest.raises(UsageError, match="is not the address of a master"):
        parse_address(text)
