"""``unified nodes``: the nodes that the master knows, and what is free on them."""

from __future__ import annotations

from argparse import ArgumentParser
from collections import Counter

from unified.cli.options import add_json, add_master, connect
from unified.cli.text import amount, first_line, print_json, table, terminal_width
from unified.protocol.client_master import ListNodes, NodeList, NodeStatus
from unified.protocol.records import NodeState

HEADER = ["NODE", "STATE", "ADDRESS", "WORKERS", "FREE CPU", "MEMORY", "DEVICES", "ALSO", "SEEN", "REASON"]


def add_arguments(parser: ArgumentParser) -> None:
    add_master(parser)
    add_json(parser)


def nodes(master: str | None, json: bool) -> None:
    """List nodes: what each has, and what of it no job holds."""
    with connect(master) as connection:
        found = connection.ask(ListNodes(), NodeList).nodes
    if json:
        print_json(found)
    elif not found:
        print("no nodes: start `unified-agent --master tcp://HOST:PORT` on a host")
    else:
        print(
            "\n".join(
                table(HEADER, [_row(node) for node in sorted(found, key=lambda node: node.node)], terminal_width())
            )
        )


def _row(node: NodeStatus) -> list[object]:
    has, free = node.resources, node.free
    kinds = ", ".join(sorted(Counter(device.kind for device in has.devices)))
    extras = [f"{name}={amount(value)}" for name, value in sorted(has.user_defined.items())]
    extras += [f"{name}={value}" for name, value in sorted(node.labels.items())]
    return [
        node.node,
        node.state,
        node.address,
        node.num_workers,
        f"{amount(free.cpu)}/{amount(has.cpu)}",
        f"{_gb(free.memory_mb)}/{_gb(has.memory_mb)} GB",
        f"{len(free.devices)}/{len(has.devices)} {kinds}".rstrip(),
        " ".join(extras) or "-",
        f"{node.seen_s_ago:.1f} s ago",
        first_line(node.reason) if node.state != NodeState.ALIVE else "",
    ]


def _gb(megabytes: float) -> str:
    """``14.9``, ``1007``: three digits are enough, and four fit."""
    return f"{megabytes / 1024:.{0 if megabytes >= 102400 else 1}f}"
