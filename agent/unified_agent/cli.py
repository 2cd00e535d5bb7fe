"""`unified-agent`: flags and environment to facts and options, then the daemon."""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from unified import process
from unified.config import settings
from unified.config.addresses import parse_flag
from unified.config.logging import log_to_stderr, logging_level
from unified.config.ports import address_towards, port_range
from unified.errors import UnifiedError, UsageError
from unified.job.names import check_modules
from unified.probes import parse_bind
from unified.protocol.records import NodeResources
from unified.sd_notify import ServiceNotifier
from unified.security.keys import ClusterKey, check_listening, find_key, may_go_without, receive_key
from unified.storage.location import open_storage
from unified_agent import host_resources
from unified_agent.daemon import AgentDaemon, AgentOptions
from unified_agent.environment import NodeFacts
from unified_agent.orphans import NodeClaim, claim
from unified_agent.spawn import ENTRY, ENTRY_FLAG, PRELOAD_FLAG, EarlyStart

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")
_MB = 1024 * 1024
WORKERS_PER_CPU = 64
LEAST_WORKERS = 256
"""Default limit of workers on a small node: it starts some 20 processes a second and CPU."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="unified-agent", description="Starts, watches and stops one node's workers.")
    add = parser.add_argument
    add("--master", default=os.environ.get("UNIFIED_MASTER"), metavar="tcp://HOST:PORT",
        help="the master's address (default: UNIFIED_MASTER)")  # fmt: skip
    add("--node-id", default=socket.gethostname(), metavar="NAME", help="this node's name (default: the host's)")
    add("--labels", action="append", default=[], metavar="K=V[,K=V]", help="may be given several times")
    add("--resources", default="{}", metavar="JSON", help="""user-defined resources, such as '{"MR": 1}'""")
    add("--devices", type=int, metavar="N", help="offer N virtual devices instead of the real ones")
    add("--cpus", type=float, metavar="N", help="offer N CPUs (default: those its affinity and control groups allow)")
    add("--memory-mb", type=float, metavar="MB",
        help="offer this much memory (default: what its control groups allow, or all)")  # fmt: skip
    add("--max-workers", type=int, metavar="N",
        help="worker processes of all jobs at most (default: 64 a CPU, and 256 at least)")  # fmt: skip
    add("--address", metavar="ADDRESS", help="at which other nodes reach this one (default: that towards the master)")
    add("--state-dir", type=Path, metavar="DIR", help=f"default: {settings.home()}/agent-NAME")
    add("--log-dir", type=Path, metavar="DIR", help="workers' output (default: STATE_DIR/logs)")
    add("--log-max-mb", type=float, default=64.0, metavar="MB", help="rotate a worker's output at this size (64)")
    add("--log-files", type=int, default=4, metavar="N", help="files kept of each stream, the newest included (4)")
    add("--log-archive", default="", metavar="ADDRESS",
        help="write workers' output there, too, compressed: a folder or s3://BUCKET/PREFIX, for when this node is gone"
        )  # fmt: skip
    add("--snapshot-mb", type=float, metavar="MB",
        help="memory for snapshots of training states, of all jobs (default: half of what is offered)")  # fmt: skip
    add("--divide-cgroup", action="store_true",
        help="give each worker a control group, within that of this process, which is its own (Delegate= of systemd)"
        )  # fmt: skip
    add("--health-bind", metavar="HOST:PORT",
        help="answer GET /healthz (its loop turns) and /readyz (it is registered) there (default: none)")  # fmt: skip
    add("--metrics-bind", metavar="HOST:PORT",
        help="answer GET /metrics there, for Prometheus; needs the extra `metrics` (default: none)")  # fmt: skip
    add("--metrics-file", type=Path, metavar="FILE",
        help="write the metrics there, for the textfile collector of node_exporter (default: none)")  # fmt: skip
    add(PRELOAD_FLAG, action="append", default=[], metavar="MODULE[,MODULE]",
        help="import these, too, before the first fork of workers; may be given several times")  # fmt: skip
    add("--connect-timeout", type=float, metavar="S", help="give up after so long without a master (default: never)")
    add("--leave-after", type=float, metavar="S",
        help="end after so long without a word of the master, also once registered (default: never)")  # fmt: skip
    add("--key-fd", type=int, metavar="FD", help="read the cluster key from this descriptor, such as 0 for stdin")
    add("--leave-at-eof", type=int, metavar="FD", help="leave in order at the end of file of this descriptor")
    add("--insecure", action="store_true",
        help="have workers listen beyond loopback without a cluster key (also: UNIFIED_INSECURE=1)")  # fmt: skip
    add("--die-with-parent", nargs="?", type=int, const=0, metavar="PID",
        help="end at once when the process that started this one ends, or if PID is not its parent now")  # fmt: skip
    add("--log-level", choices=["debug", "info", "warning", "error"],
        help="one of debug, info, warning, error (default: UNIFIED_LOG_LEVEL or DLROVER_LOG_LEVEL or RUST_LOG, "
             "else info)")  # fmt: skip
    add(ENTRY_FLAG, default=ENTRY, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None, early: EarlyStart | None = None) -> int:
    """Run the agent and return its exit code."""
    arguments = build_parser().parse_args(argv)
    parent = None
    if arguments.die_with_parent is not None:
        parent = arguments.die_with_parent or os.getppid()
        process.die_with_parent(signal.SIGTERM, parent)
    try:
        return _run(arguments, parent, early)
    except (UnifiedError, OSError, ValueError) as error:
        print(f"unified-agent: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def _run(arguments: argparse.Namespace, parent: int | None, early: EarlyStart | None) -> int:
    notifier = ServiceNotifier(os.environ, is_helper=parent is not None)
    settings.check_descriptors()
    port_range()  # a bad range is refused here, not in each worker
    node = arguments.node_id
    if not _NODE.match(node):
        raise UsageError(f"node id {node!r} is not allowed: at most 63 of letters, digits and ._-")
    master, host, port = _master(arguments.master)
    log_to_stderr(f"agent {node}", logging_level(arguments.log_level, os.environ))
    process.set_title("unified-agent")
    key = find_key(master) if arguments.key_fd is None else receive_key(arguments.key_fd)
    options = _options(arguments, master, key, parent)
    _check_offer(arguments)
    address = arguments.address or _address(host, port, master)
    is_insecure = arguments.insecure or may_go_without()
    warning = check_listening(f"a worker of unified-agent {node}", [address], key, insecure=is_insecure)
    if warning is not None:
        logging.getLogger("unified_agent").warning("event=insecure reason=%r", warning)
    with claim(settings.make_run_root(settings.BELOW_AGENT), node, master, early.incarnation if early else "") as own:
        facts = _facts(arguments, node, own, master, address)
        end = AgentDaemon(facts, settings.intervals(), options, os.environ, notifier).run(early and early.zygote)
    if end.code != 0:
        print(f"unified-agent: {end.reason}", file=sys.stderr)
    return end.code


def _facts(arguments: argparse.Namespace, node: str, own: NodeClaim, master: str, address: str) -> NodeFacts:
    if arguments.log_archive:
        open_storage(arguments.log_archive)  # a bad address is refused before anything starts
    state_dir = arguments.state_dir or settings.home() / f"agent-{node}"
    log_dir = (arguments.log_dir or state_dir / "logs").absolute()
    try:
        settings.make_folder(log_dir)
    except OSError as error:
        if arguments.log_dir:
            raise UsageError(settings.unusable("the log directory", log_dir, error, "--log-dir")) from None
        raise UsageError(settings.unusable("the state directory", state_dir, error, "--state-dir")) from None
    devices, device_ids = host_resources.find_devices(os.environ, arguments.devices)
    return NodeFacts(
        node=node,
        incarnation=own.incarnation,
        hostname=socket.gethostname(),
        host_id=settings.host_id(),
        address=address,
        master=master,
        pid=os.getpid(),
        run_dir=str(own.run_dir),
        log_dir=str(log_dir),
        log_archive=arguments.log_archive,
        resources=NodeResources(
            cpu=host_resources.cpus() if arguments.cpus is None else arguments.cpus,
            memory_mb=host_resources.memory_mb() if arguments.memory_mb is None else arguments.memory_mb,
            disk_mb=host_resources.disk_mb(log_dir),
            devices=devices,
            user_defined=_resources(arguments.resources),
            max_workers=_max_workers(arguments),
        ),
        host_cpus=host_resources.cpus(),
        labels=_labels(arguments.labels),
        interface=host_resources.interface_of(address),
        device_ids=device_ids,
        inherited=dict(os.environ),
        python=settings.python(),
        preload=tuple(check_modules(arguments.preload)),
    )


def _options(arguments: argparse.Namespace, master: str, key: ClusterKey | None, parent: int | None) -> AgentOptions:
    if arguments.snapshot_mb is not None and not 0 <= arguments.snapshot_mb < math.inf:
        raise UsageError(f"--snapshot-mb {arguments.snapshot_mb:g} is not an amount of memory: 0 or more.")
    offered_mb = host_resources.memory_mb() if arguments.memory_mb is None else arguments.memory_mb
    if arguments.log_max_mb <= 0 or arguments.log_files < 1:
        raise UsageError("--log-max-mb must be above 0 and --log-files at least 1.")
    return AgentOptions(
        entry=arguments.worker_entry,
        log_max_bytes=max(1, int(arguments.log_max_mb * _MB)),
        log_files=arguments.log_files,
        connect_timeout_s=arguments.connect_timeout,
        leave_after_s=arguments.leave_after,
        leave_fd=arguments.leave_at_eof,
        key=key,
        find_key=functools.partial(find_key, master) if arguments.key_fd is None else None,
        snapshot_mb=offered_mb / 2 if arguments.snapshot_mb is None else arguments.snapshot_mb,
        parent=parent,
        divides_group=arguments.divide_cgroup,
        health_bind=parse_bind(arguments.health_bind),
        metrics_bind=parse_bind(arguments.metrics_bind, "--metrics-bind"),
        metrics_file=arguments.metrics_file,
    )


def _max_workers(arguments: argparse.Namespace) -> int:
    if arguments.max_workers is None:
        return max(LEAST_WORKERS, int(WORKERS_PER_CPU * host_resources.cpus()))
    if arguments.max_workers < 1:
        raise UsageError(f"--max-workers {arguments.max_workers} is not a number of processes: 1 or more.")
    return int(arguments.max_workers)


def _check_offer(arguments: argparse.Namespace) -> None:
    """Check the offered amounts; NaN is refused too."""
    if arguments.devices is not None and arguments.devices < 0:
        raise UsageError(f"--devices {arguments.devices} is not a number of devices: 0 or more, or leave it out.")
    if arguments.cpus is not None and not 0 < arguments.cpus < math.inf:
        raise UsageError(f"--cpus {arguments.cpus:g} is not a number of CPUs: above 0, or leave it out.")
    if arguments.memory_mb is not None and not 0 <= arguments.memory_mb < math.inf:
        raise UsageError(f"--memory-mb {arguments.memory_mb:g} is not an amount of memory: 0 or more, or leave it out.")


def _master(text: str | None) -> tuple[str, str, int]:
    """Return the address for ZeroMQ, and its host and port."""
    if not text:
        raise UsageError("no master: give --master tcp://HOST:PORT or set UNIFIED_MASTER.")
    found = parse_flag("--master", text)
    if not found.port:
        raise UsageError(f"--master {text!r} is not an address: its port is 0.")
    return found.url, found.bare_host, found.port


def _address(host: str, port: int, master: str) -> str:
    try:
        return address_towards(host, port)
    except OSError as error:
        raise UsageError(
            f"no local address leads to the master at {master} ({error.strerror}): check the name, or give --address."
        ) from None


def _labels(given: Sequence[str]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for pair in (part for text in given for part in text.split(",") if part):
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise UsageError(f"--labels {pair!r} is not KEY=VALUE.")
        labels[key] = value
    return labels


def _resources(text: str) -> dict[str, float]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--resources is not JSON: {error}; write '{{\"MR\": 1}}'.") from None
    if not isinstance(found, dict) or not all(
        isinstance(amount, int | float) and not isinstance(amount, bool) and amount >= 0 for amount in found.values()
    ):
        raise UsageError(f"--resources {text!r} must map names to amounts, such as '{{\"MR\": 1}}'.")
    return {name: float(amount) for name, amount in found.items()}
