"""``UNIFIED_PORT_RANGE``: what listens on any free port takes one of these."""

import errno
from socket import AF_INET, AF_INET6, AF_PACKET, AddressFamily
from typing import NamedTuple

import pytest

from unified.config.ports import address_of, bind_free, port_range
from unified.errors import UsageError


class InterfaceAddress(NamedTuple):
    family: AddressFamily
    address: str


@pytest.mark.parametrize("text", ["20000", "20000-", "80-90", "30000-20000", "20000-70000", "a-b", "20000 - 20999"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no range of ports from 1024 to 65535, such as 20000-20999"):
        port_range({"UNIFIED_PORT_RANGE": text})


def test_the_range_has_both_ends() -> None:
    assert port_range({"UNIFIED_PORT_RANGE": "20000-20001"}) == range(20000, 20002)
    assert port_range({}) is None
    assert port_range({"UNIFIED_PORT_RANGE": ""}) is None


def test_each_port_is_tried_until_one_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIFIED_PORT_RANGE", "1030-1039")
    tried: list[int] = []

    def bind(port: int) -> int:
        tried.append(port)
        if port != 1037:
            raise OSError(errno.EADDRINUSE, "in use")
        return port

    assert bind_free(bind) == 1037
    assert len(set(tried)) == len(tried)
    assert bind_free(lambda port: port, 7077) == 7077, "a port that was chosen is that one"
    with pytest.raises(UsageError, match="no port of UNIFIED_PORT_RANGE=1030-1039 is free on this host: make it wid"):
        bind_free(lambda _: bind(1030))
    with pytest.raises(PermissionError):
        bind_free(lambda _: (_ for _ in ()).throw(PermissionError(errno.EACCES, "no")))


def test_without_a_range_the_kernel_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNIFIED_PORT_RANGE", raising=False)
    assert bind_free(lambda port: port) == 0


def test_the_address_of_a_network_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_of("lo") == "127.0.0.1"
    mac, link = InterfaceAddress(AF_PACKET, "00:00:5e:00:53:01"), InterfaceAddress(AF_INET6, "fe80::1%ib0")
    there = {
        "ib0": [mac, link, InterfaceAddress(AF_INET6, "fd00::7"), InterfaceAddress(AF_INET, "10.9.0.7")],
        "ib1": [mac, link, InterfaceAddress(AF_INET6, "fd00::8")],
        "ib2": [mac, link],
    }
    monkeypatch.setattr("psutil.net_if_addrs", lambda: there)
    assert (address_of("ib0"), address_of("ib1")) == ("10.9.0.7", "fd00::8")
    for name in ("ib2", "eth0"):
        with pytest.raises(UsageError, match=f"has no network interface '{name}' with an address; ib0, ib1 have one"):
            address_of(name)
