"""What people and variables write where the address of a coordinator is meant, and what a socket takes."""

from __future__ import annotations

import re

from unified.errors import UsageError
from unified.settings import DEFAULT_PORT

LOCAL = "local"
_ADDRESS = re.compile(
    r"(?:(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://)?(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(?::(?P<port>\d{1,5}))?/?\Z"
)


def parse_coordinator(text: str) -> str | None:
    """``tcp://HOST:PORT`` from that, from ``http://HOST:PORT``, ``HOST:PORT`` or ``HOST`` (port 7077); None from
    ``local``, which means a coordinator in this process.

    Raises:
        UsageError: it is none of them.
    """
    word = text.strip()
    if word.lower() == LOCAL:
        return None
    found = _ADDRESS.match(word)
    port = int(found["port"] or DEFAULT_PORT) if found else 0
    scheme = (found["scheme"] or "tcp").lower() if found else ""
    if found is None or scheme not in ("tcp", "http") or not 0 < port < 65536:
        raise UsageError(
            f"{text!r} is not the address of a coordinator: write tcp://HOST:PORT, http://HOST:PORT or HOST:PORT of a "
            "master, such as tcp://10.0.0.1:7077, or 'local' for one in this process."
        )
    return f"tcp://{found['host']}:{port}"
