"""Checks between this host and a cluster: the master's name, answer and clock, addresses, and ports of the nodes."""

from __future__ import annotations

import errno
import os
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import psutil

from unified.client.connection import connect_to
from unified.config.addresses import HostPort, split_address
from unified.config.ports import address_towards, port_range
from unified.doctor import judgement
from unified.doctor.host import LATE, Check, name_check, run
from unified.doctor.judgement import Finding, fine, untested, wrong
from unified.errors import KeyFileError, UnifiedError
from unified.protocol.client_master import ListNodes, NodeList, NodeStatus
from unified.protocol.records import NodeState

MOST_NODES = 64
"""Greatest number of nodes that are tried; of more nodes, a random choice."""
CONNECT_S = 3.0
LINUX_PORTS = range(32_768, 61_000)


def examine_cluster(address: str) -> list[Finding]:
    """Check connections from this host to the master at ``tcp://HOST:PORT`` and to the nodes that it lists; in 30 s."""
    master = split_address(address)
    if (found := run([name_check("master's name", master.bare_host)]))[0].what.startswith(LATE):
        return found  # each further check would wait for that name
    try:
        with connect_to(address) as connection:
            asked_at = time.time()
            listed = connection.ask(ListNodes(), NodeList)
            answered_at = time.time()
    except KeyFileError:
        return [*found, untested("its answer, since the cluster key cannot be read", check="master")]
    except UnifiedError as error:
        advice = "Nothing listens where a connection is refused; a firewall or a dead host gives no answer."
        return [*found, wrong(f"{error} A TCP connection: {_connect(master) or 'is made'}.", advice, "master")]
    slack_s = (answered_at - asked_at) / 2
    own = address_towards(master.bare_host, master.port or 0)
    here = {own, *(each.address for entries in psutil.net_if_addrs().values() for each in entries)}
    others = [node for node in listed.nodes if node.state == NodeState.ALIVE and node.address not in here]
    checks = [
        Check("master", lambda: fine(f"{address} answers in {slack_s * 2000:.0f} ms; nodes: {len(listed.nodes)}")),
        Check("clock", lambda: judgement.clock(asked_at + slack_s - listed.at, slack_s)),
        Check("own address", lambda: judgement.own_address(own, [node.address for node in others])),
        Check("ports", lambda: _ports(listed.relay, others)),
    ]
    back = "connections of other nodes to this one, and whether Python and torch there are those of this host"
    return [*found, *run(checks), untested(back, "Run `unified doctor` there, too.", "other nodes")]


def _ports(relay: str, others: list[NodeStatus]) -> Finding:
    """Connect to the relay, and to a port of each node. Mostly nobody listens there, but a refusal is an answer."""
    chosen, ports = random.sample(others, min(len(others), MOST_NODES)), port_range() or LINUX_PORTS
    tried = {f"node {each.node}": HostPort(each.address, random.choice(ports)) for each in chosen}
    with ThreadPoolExecutor(MOST_NODES) as pool:
        problems = dict(zip(tried, pool.map(_connect, tried.values()), strict=True))
    refused = os.strerror(errno.ECONNREFUSED)
    unreached = {who: why for who, why in problems.items() if why not in ("", refused)}
    if relay and (why := _connect(split_address(relay))):
        unreached["the relay"] = why
    return judgement.ports(unreached, len(tried), len(others))


def _connect(to: HostPort) -> str:
    """Return why a connection fails; empty: it succeeds."""
    try:
        socket.create_connection((to.bare_host, to.port or 0), CONNECT_S).close()
    except OSError as error:
        return error.strerror or f"no answer within {CONNECT_S:g} s"
    return ""
