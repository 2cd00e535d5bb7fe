"""``unified drain`` and ``unified undrain``: commands that take a node out of service, and put it back."""

from __future__ import annotations

import time
from argparse import ArgumentParser

from unified.cli.options import add_master, at_least
from unified.client.connection import MasterConnection, connect_master
from unified.protocol.client_master import Done, DrainNode, ListNodes, NodeList
from unified.protocol.records import NodeState

POLL_S = 0.2


def drain_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("node", metavar="NODE", help="The node's name, as `unified nodes` has it.")
    add_master(parser)
    parser.add_argument("--reason", default="unified drain", metavar="TEXT", help="Shown by `unified nodes`.")
    parser.add_argument("--no-wait", action="store_true", help="Do not wait until nothing runs there.")
    parser.add_argument(
        "--timeout", type=at_least(0.0), default=300.0, metavar="S", help="Seconds to wait for that (300)."
    )


def drain(node: str, master: str | None, reason: str, no_wait: bool, timeout: float) -> None:
    """Take a node out of service and wait until no worker is left there.

    Workers that ran there start again on other nodes, without a charge to any limit; a job that does not fit on the
    others waits for room. No job begins there until `unified undrain`.
    """
    with connect_master(master) as connection:
        connection.ask(DrainNode(node=node, reason=reason), Done)
        if not no_wait:
            _await_empty(connection, node, timeout)
    print(f"node {node} is drained" if not no_wait else f"node {node} is being drained")


def undrain_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("node", metavar="NODE", help="The node's name, as `unified nodes` has it.")
    add_master(parser)


def undrain(node: str, master: str | None) -> None:
    """Put a node back into service."""
    with connect_master(master) as connection:
        print(connection.ask(DrainNode(node=node, is_over=True), Done).note)


def _await_empty(connection: MasterConnection, node: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        found = {each.node: each for each in connection.ask(ListNodes(), NodeList).nodes}.get(node)
        left = found.num_workers + found.num_leaving if found and found.state == NodeState.ALIVE else 0
        if not left:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{left} workers still run on node {node} after {timeout:g} s: `unified nodes` shows it."
            )
        time.sleep(POLL_S)
