"""Addresses of masters and coordinators, as arguments and variables write them, and as sockets take them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from ipaddress import IPv6Address
from typing import NamedTuple
from urllib.parse import urlsplit

from unified.config.clusters import kept_cluster
from unified.config.settings import DEFAULT_PORT
from unified.errors import UsageError

MASTER_VARIABLE = "UNIFIED_MASTER"
LOCAL = "local"
MAX_PORT = 65_535
_NAME = re.compile(r"[A-Za-z0-9._-]+|\*")
_PORT = re.compile(r"(:\d{1,5})?")
own_masters: list[str] = []
"""Addresses of the clusters that `unified.local_cluster` keeps in this process; the last one is used."""


class HostPort(NamedTuple):
    """A host, and its port if the text had one."""

    host: str
    """A name, an IPv4 address, an IPv6 address in brackets, or ``*`` for all addresses of this host."""
    port: int | None

    @property
    def bare_host(self) -> str:
        """Host without brackets, as `socket` takes it."""
        return self.host.strip("[]")

    @property
    def url(self) -> str:
        """``tcp://HOST:PORT``, by default with port 7077."""
        return f"tcp://{self.host}:{DEFAULT_PORT if self.port is None else self.port}"


def split_address(text: str, schemes: Collection[str] = ("tcp",)) -> HostPort:
    """Split ``HOST``, ``HOST:PORT`` or, with one of the schemes, ``SCHEME://HOST:PORT``. A slash may follow.

    ValueError: any other text; the message is a sentence that says why.
    """
    expected = ValueError("host:port is expected.")
    if text.split() != [text]:  # urlsplit ignores some white space
        raise expected
    try:
        parts = urlsplit(text if "://" in text else f"//{text}")
        is_v6 = "[" in parts.netloc
        host = parts.netloc[: len(parts.hostname or "") + 2 * is_v6]  # parts.hostname is in lower case
        if is_v6:
            IPv6Address(parts.hostname or "")
    except ValueError:
        raise expected from None
    port = parts.netloc[len(host) :]
    is_plain = parts.path in ("", "/") and not (parts.query or parts.fragment) and parts.scheme in ("", *schemes)
    if not (is_plain and (is_v6 or _NAME.fullmatch(host)) and _PORT.fullmatch(port)):
        raise expected
    if port and int(port[1:]) > MAX_PORT:
        raise ValueError(f"a port is at most {MAX_PORT}.")
    return HostPort(host, int(port[1:]) if port else None)


def parse_address(text: str) -> str:
    """Return ``tcp://HOST:PORT`` for that form, ``HOST:PORT`` or ``HOST`` (port 7077); else raise UsageError."""
    found = _destination(text, ("tcp",))
    if found is None:
        raise UsageError(
            f"{text!r} is not the address of a master: write tcp://HOST:PORT, such as tcp://10.0.0.1:7077."
        )
    return found.url


def parse_coordinator(text: str) -> str | None:
    """Return ``tcp://HOST:PORT`` for that form, ``http://HOST:PORT``, ``HOST:PORT`` or ``HOST`` (port 7077); None for
    ``local``, which means a coordinator in this process. Any other text raises UsageError.
    """
    if text.strip().lower() == LOCAL:
        return None
    found = _destination(text, ("tcp", "http"))
    if found is None:
        raise UsageError(
            f"{text!r} is not the address of a coordinator: write tcp://HOST:PORT, http://HOST:PORT or HOST:PORT of a "
            "master, such as tcp://10.0.0.1:7077, or 'local' for one in this process."
        )
    return found.url


def parse_flag(flag: str, text: str) -> HostPort:
    """Return the address that a daemon's flag gives: ``tcp://HOST:PORT`` or ``HOST:PORT``; else raise UsageError."""
    try:
        found = split_address(text)
    except ValueError:
        found = None
    if found is None or found.port is None:
        raise UsageError(f"{flag} {text!r} is not an address: write tcp://HOST:PORT.")
    return found


def named_master(given: str | None) -> str | None:
    """Return the master's address from `given`, else from ``UNIFIED_MASTER``; None if neither names one."""
    text = given or os.environ.get(MASTER_VARIABLE)
    return parse_address(text) if text and text.strip().lower() != LOCAL else None


def find_master(given: str | None) -> str | None:
    """Return the master's address from `given`, else that of this process's own `local_cluster`, else from
    ``UNIFIED_MASTER``, else that of ``unified up``, else None.

    ``local``, or a ``UNIFIED_MASTER`` that is set and empty, means a cluster of one's own: None.
    """
    if not given and own_masters:
        return own_masters[-1]
    if given or MASTER_VARIABLE in os.environ:
        return named_master(given)
    kept = kept_cluster()
    return None if kept is None else kept.address


def _destination(text: str, schemes: Collection[str]) -> HostPort | None:
    """Return an address that a client can connect to; None: the text is no such address."""
    try:
        found = split_address(text.strip(), schemes)
    except ValueError:
        return None
    return None if found.host == "*" or found.port == 0 else found
