"""Scripts that choose the address of torch's store themselves, as many tutorials of DDP do.

The runtime has a store of its own for each round, and all ranks are its clients. A script that sets ``MASTER_ADDR`` and
``MASTER_PORT``, or names a ``tcp://`` address, expects a store in rank 0. torch would take all ranks for clients, and
wait there for its whole timeout. The port of the round's store, at any name of that store's host, is the round's store.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from unified.errors import UsageError
from unified.security.keys import is_loopback

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


class _StoreAddress(NamedTuple):
    host: str
    port: str


_of_round: _StoreAddress | None = None


def learn(host: str, port: int) -> None:
    """Take in the address of the round's store, which the environment names from now on."""
    global _of_round
    _of_round = _StoreAddress(host, str(port))


@contextlib.contextmanager
def own_store(arguments: MutableMapping[str, Any], environ: MutableMapping[str, str]) -> Iterator[None]:
    """Let rank 0 serve the store during `init_process_group` with these arguments, if they name another store than the
    round's. If they name the round's by another name of its host, put the address at which the store listens there.

    Raises:
        UsageError: ranks of other hosts cannot reach the store, or its address is none of rank 0's host.
    """
    chosen = _chosen(arguments, environ)
    if _of_round is None or chosen is None or chosen == _of_round:
        yield
        return
    if chosen.port == _of_round.port and _is_same_host(chosen.host, _of_round.host):
        _put_address(_of_round, arguments, environ)
        yield
        return
    is_first = int(arguments.get("rank", -1)) == 0 or environ.get("RANK") == "0"
    if not is_loopback(_of_round.host):  # there are other hosts
        _check_reachable(chosen, _of_round, is_first=is_first)
    if is_first:
        print(f"unified: {_says(chosen)}, so rank 0 serves the store there. Without that the runtime's is used.",
              file=sys.stderr)  # fmt: skip
    before = environ.get(AGENT_STORE)
    environ[AGENT_STORE] = "False"
    try:
        yield
    finally:
        if before is None:
            del environ[AGENT_STORE]
        else:
            environ[AGENT_STORE] = before


def _chosen(arguments: Mapping[str, Any], environ: Mapping[str, str]) -> _StoreAddress | None:
    """Return the store that the arguments, or the environment, name by an address; None: they name it otherwise."""
    if arguments.get("store") is not None:
        return None
    method = arguments.get("init_method") or "env://"
    if method.startswith("tcp://"):
        found = urlsplit(method)
        return _StoreAddress(found.hostname or "", str(found.port))
    return _StoreAddress(environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")) if method == "env://" else None


def _put_address(ours: _StoreAddress, arguments: MutableMapping[str, Any], environ: MutableMapping[str, str]) -> None:
    method = urlsplit(arguments.get("init_method") or "")
    if method.scheme == "tcp":
        host = f"[{ours.host}]" if ":" in ours.host else ours.host
        arguments["init_method"] = method._replace(netloc=f"{host}:{ours.port}").geturl()
    else:
        environ["MASTER_ADDR"] = ours.host


def _says(chosen: _StoreAddress) -> str:
    return f"this script sets MASTER_ADDR={chosen.host} and MASTER_PORT={chosen.port} itself"


def _check_reachable(chosen: _StoreAddress, ours: _StoreAddress, *, is_first: bool) -> None:
    if is_loopback(chosen.host):
        why = "which ranks of other hosts cannot reach"
    elif is_first and not _is_of_this_host(chosen.host):
        why = "which is no address of the host of rank 0"
    else:
        return
    raise UsageError(
        f"{_says(chosen)}, {why}. Delete the two lines: the runtime has set MASTER_ADDR={ours.host} and "
        f"MASTER_PORT={ours.port}."
    )


def _is_same_host(one: str, other: str) -> bool:
    is_here = _is_of_this_host(one) and _is_of_this_host(other)
    return is_here or not {found[4] for found in _resolved(one)}.isdisjoint(found[4] for found in _resolved(other))


def _is_of_this_host(host: str) -> bool:
    for family, kind, protocol, _, address in _resolved(host):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def _resolved(host: str) -> list[tuple[Any, ...]]:
    with contextlib.suppress(OSError):
        return [*socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)]
    return []
