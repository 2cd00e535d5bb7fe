"""TCP ports for listeners on any free port: those of ``UNIFIED_PORT_RANGE``, if a site filters all others."""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Callable, Mapping
from typing import TypeVar

from unified.errors import UsageError, listed

PORT_RANGE = "UNIFIED_PORT_RANGE"
HELD_PORTS = range(20_000, 30_000)
"""Ports that agents hold for workers without ``UNIFIED_PORT_RANGE``: below those that Linux gives by itself."""
_GUARD = "127.255.255.254"
"""Address that no connection has: a bind there fails on a held port, and not on one with connections in TIME_WAIT."""
T = TypeVar("T")


def port_range(env: Mapping[str, str] | None = None) -> range | None:
    """Return the ports of ``UNIFIED_PORT_RANGE``, such as ``20000-20999``, both ends included; None: any.

    Raises:
        UsageError: it is no range of ports above 1023.
    """
    text = (os.environ if env is None else env).get(PORT_RANGE, "")
    if not text:
        return None
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 1024 <= int(first) <= int(last) <= 65_535):
        raise UsageError(f"{PORT_RANGE}={text!r} is no range of ports from 1024 to 65535, such as 20000-20999.")
    return range(int(first), int(last) + 1)


def bind_address(bind: Callable[[str], object], address: str) -> None:
    """Call `bind` with ``tcp://HOST:PORT``; port 0, and errors, as in `bind_free`."""
    host, _, port = address.rpartition(":")
    bind_free(lambda free: bind(f"{host}:{free}"), int(port))


def bind_free(bind: Callable[[int], T], port: int = 0) -> T:
    """Return ``bind(port)``; for port 0, try the ports of the range in random order until one is free.

    Raises:
        UsageError: no port is free.
    """
    allowed = port_range()
    if port or allowed is None:
        return bind(port)
    for each in random.sample(allowed, len(allowed)):
        with socket.socket() as guard:  # a port that an agent holds for a worker is left alone
            try:
                guard.bind((_GUARD, each))
                guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                return bind(each)
            except Exception as error:  # ZeroMQ's error is no OSError
                if getattr(error, "errno", None) != errno.EADDRINUSE:
                    raise
    raise UsageError(f"no port of {PORT_RANGE}={os.environ[PORT_RANGE]} is free on this host: make it wider.")


def address_towards(host: str, port: int) -> str:
    """Return the local address from which packets to `host` leave; OSError: no name, or no route. Nothing is sent."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def address_of(interface: str) -> str:
    """Return the address of a network interface of this host, IPv4 before IPv6; UsageError: there is none."""
    import psutil  # only needed to choose an interface

    families = (socket.AF_INET, socket.AF_INET6)
    found = {  # an address of one link alone (fe80::) has a zone, after %
        name: [
            each.address for family in families for each in entries if each.family == family and "%" not in each.address
        ]
        for name, entries in psutil.net_if_addrs().items()
    }
    if not found.get(interface):
        usable = listed(name for name, addresses in found.items() if addresses)
        raise UsageError(
            f"host {socket.gethostname()} has no network interface {interface!r} with an address; {usable} have one."
        )
    return found[interface][0]
