"""Addresses of masters and coordinators, as arguments and variables have them and as a socket takes them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from unified.config import settings
from unified.config.settings import DEFAULT_PORT
from unified.errors import UsageError

MASTER_VARIABLE = "UNIFIED_MASTER"
_MASTER = re.compile(r"(?:tcp://)?(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(?::(?P<port>\d{1,5}))?\Z")
LOCAL = "local"
_COORDINATOR = re.compile(
    r"(?:(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://)?(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(?::(?P<port>\d{1,5}))?/?\Z"
)


def parse_address(text: str) -> str:
    """``tcp://HOST:PORT`` from that, from ``HOST:PORT`` or from ``HOST`` (port 7077).

    Raises:
        UsageError: it is none of them.
    """
    found = _MASTER.match(text.strip())
    port = int(found["port"] or DEFAULT_PORT) if found else 0
    if found is None or not 0 < port < 65536:
        raise UsageError(
            f"{text!r} is not the address of a master: write tcp://HOST:PORT, such as tcp://10.0.0.1:7077."
        )
    return f"tcp://{found['host']}:{port}"


def parse_coordinator(text: str) -> str | None:
    """``tcp://HOST:PORT`` from that, from ``http://HOST:PORT``, ``HOST:PORT`` or ``HOST`` (port 7077); None from
    ``local``, which means a coordinator in this process.

    Raises:
        UsageError: it is none of them.
    """
    word = text.strip()
    if word.lower() == LOCAL:
        return None
    found = _COORDINATOR.match(word)
    port = int(found["port"] or DEFAULT_PORT) if found else 0
    scheme = (found["scheme"] or "tcp").lower() if found else ""
    if found is None or scheme not in ("tcp", "http") or not 0 < port < 65536:
        raise UsageError(
            f"{text!r} is not the address of a coordinator: write tcp://HOST:PORT, http://HOST:PORT or HOST:PORT of a "
            "master, such as tcp://10.0.0.1:7077, or 'local' for one in this process."
        )
    return f"tcp://{found['host']}:{port}"


def find_master(given: str | None, env: Mapping[str, str] | None = None) -> str | None:
    """The master's address from `given`, else from ``UNIFIED_MASTER``, else None."""
    env = os.environ if env is None else env
    text = given or env.get(MASTER_VARIABLE) or ""
    return parse_address(text) if text else None


def require_master(given: str | None, env: Mapping[str, str] | None = None) -> str:
    """As `find_master`, where there is nothing to do without one.

    Raises:
        UsageError: neither is given; the message says how to give it.
    """
    address = find_master(given, env)
    if address is None:
        raise UsageError(
            f"which master? Give its address with --master tcp://HOST:PORT, or once with "
            f"`export {MASTER_VARIABLE}=tcp://HOST:PORT`. (`unified-master` prints it when it starts.)"
        )
    return address


def connect_seconds() -> float:
    """How long to try to reach a master.

    Raises:
        UsageError: ``UNIFIED_CONNECT_S``, or another interval, is not a number above 0.
    """
    try:
        return settings.intervals().connect_s
    except ValueError as error:
        raise UsageError(str(error)) from None
