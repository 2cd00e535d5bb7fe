"""Routes to an inbox: `ipc` on this host, `tcp` to another, `relay` where neither leads there. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from unified.errors import OptionError, RpcError, nearest
from unified.protocol.records import Inbox

Policy = Literal["auto", "tcp", "relay"]
"""`auto`: the best route. `tcp`: no Unix sockets, even on one host. `relay`: all through the master's relay."""
VARIABLE = "UNIFIED_BUS_ROUTE"
LOCAL = "ipc://"
"""A Unix socket that speaks `unified.bus.transport.framing`."""
BULK = "bulk://"
"""A port for large payloads beside the ``tcp`` one, where there is a key (`unified.bus.transport.bulk_receiver`)."""
MAX_IPC_PATH = 107
"""Characters of a Unix socket's path on Linux."""


class Route(NamedTuple):
    """Kind and address of a route to an inbox."""

    kind: Literal["ipc", "tcp", "relay"]
    address: str


def read_policy(given: str, env: Mapping[str, str]) -> Policy:
    """Return the policy; ``UNIFIED_BUS_ROUTE`` overrides ``auto``. OptionError: there is no such policy."""
    word = env.get(VARIABLE, "auto") if given == "auto" else given
    known = get_args(Policy)
    if word in known:
        return word  # type: ignore[return-value]  # it equals one of the literals
    raise OptionError(f"{VARIABLE}={word!r} is none of {', '.join(known)}.{nearest(word, known)}")


def choose_route(inbox: Inbox, *, host_id: str, policy: Policy, relay: str) -> Route:
    """Choose the route to an inbox from a process on the host `host_id`. RpcError: nothing leads there."""
    if policy != "relay":
        for address in inbox.routes:
            if address.startswith(LOCAL) and policy == "auto" and inbox.host_id == host_id:
                return Route("ipc", address)
            if address.startswith("tcp://"):
                return Route("tcp", address)
    if relay:
        return Route("relay", relay)
    raise RpcError(
        f"no route leads to inbox {inbox.inbox_id}: it offers {', '.join(inbox.routes) or 'no address'}, the policy "
        f"here is {policy!r}, and there is no relay. Is {VARIABLE} set, or the master started without a relay?"
    )


def ipc_address(run_dir: str, inbox_id: str) -> tuple[str, str]:
    """Return the `ipc` address of an inbox, or an empty string and the reason why it has none."""
    path = f"{run_dir}/{inbox_id}"
    length = len(path.encode())
    if length <= MAX_IPC_PATH:
        return f"{LOCAL}{path}", ""
    return "", f"its path would have {length} bytes, {MAX_IPC_PATH} are allowed: set UNIFIED_RUN_DIR to a shorter one"
