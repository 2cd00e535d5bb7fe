"""`unified-master`: flags and environment to options, then the daemon."""

from __future__ import annotations

import argparse
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from unified import process
from unified.config import settings
from unified.config.addresses import HostPort, parse_flag, split_address
from unified.config.logging import log_to_stderr, logging_level
from unified.config.runtime import RuntimeSettings
from unified.coordinator.core.workers import HeartbeatTimes
from unified.errors import UnifiedError, UsageError
from unified.probes import parse_bind
from unified.sd_notify import ServiceNotifier
from unified.security.keys import ClusterKey, check_listening, find_key, is_loopback, may_go_without
from unified_master.daemon import MasterDaemon, MasterOptions
from unified_master.gateway_process import GatewayAddress
from unified_master.store import OtherStoreError, back_up


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="unified-master",
        description="Decides where and when the workers of all jobs live. Agents and clients connect to it.",
        epilog="Intervals come from UNIFIED_HEARTBEAT_S, UNIFIED_LEASE_S, UNIFIED_SETTLE_S, UNIFIED_CONNECT_S, "
        "UNIFIED_START_S, in seconds; those of data, barriers and checkpoints from [coordinator] of the settings.",
    )
    add = parser.add_argument
    add("--bind", metavar="tcp://HOST:PORT",
        help="where to listen; port 0 takes any free one (default: [coordinator] address of the settings, "
        f"tcp://{RuntimeSettings().coordinator.address})")  # fmt: skip
    add("--state-dir", type=Path, metavar="DIR",
        help=f"where decisions are kept; one master a directory (default: {settings.home() / 'master'})")  # fmt: skip
    add("--backup", type=Path, metavar="FILE",
        help="copy the state of --state-dir to a new file, also while a master runs, and end")  # fmt: skip
    add("--relay-bind", metavar="tcp://HOST:PORT",
        help="where the bus relay listens (default: the host of --bind, any free port)")  # fmt: skip
    add("--insecure", action="store_true",
        help="listen beyond loopback without a cluster key (also: UNIFIED_INSECURE=1)")  # fmt: skip
    add("--advertise", metavar="HOST",
        help="name or address by which others reach this master and its relay, where it moves between hosts behind one "
        "(default: that of --bind)")  # fmt: skip
    add("--health-bind", metavar="HOST:PORT",
        help="answer GET /healthz (its loop turns) and /readyz (it takes requests) there (default: none)")  # fmt: skip
    add("--http", metavar="[HOST:]PORT",
        help="start the training API there, as a process of its own (unified-gateway has more flags)")  # fmt: skip
    add("--address-file", type=Path, metavar="FILE", help="write the address here once the master is ready")
    add("--die-with-parent", nargs="?", type=int, const=0, metavar="PID",
        help="end when the process that started this one ends, or if PID is not its parent now")  # fmt: skip
    add("--log-level", choices=["debug", "info", "warning", "error"],
        help="one of debug, info, warning, error (default: UNIFIED_LOG_LEVEL or DLROVER_LOG_LEVEL or RUST_LOG, "
             "else info)")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the master and return its exit code."""
    arguments = build_parser().parse_args(argv)
    if arguments.die_with_parent is not None:
        process.die_with_parent(signal.SIGTERM, arguments.die_with_parent or os.getppid())
    process.set_title("unified-master")
    try:
        notifier = ServiceNotifier(os.environ, is_helper=arguments.die_with_parent is not None)
        settings.check_descriptors()
        log_to_stderr("master", logging_level(arguments.log_level, os.environ))
        state_dir = arguments.state_dir or settings.home() / "master"
        if arguments.backup is not None:
            back_up(state_dir, arguments.backup)
            return 0
        coordinator = RuntimeSettings.load_shared().coordinator
        bind = parse_flag("--bind", arguments.bind or coordinator.address).url
        relay_bind = parse_flag("--relay-bind", arguments.relay_bind).url if arguments.relay_bind else None
        key, find = _key([bind, relay_bind or bind], arguments.insecure)
        options = MasterOptions(
            bind=bind,
            state_dir=state_dir,
            intervals=settings.intervals(),
            worker_heartbeats=HeartbeatTimes(
                coordinator.heartbeat_interval_ms / 1000, coordinator.heartbeat_timeout_ms / 1000
            ),
            relay_bind=relay_bind,
            address_file=arguments.address_file,
            advertise=_advertised_host(arguments.advertise),
            health_bind=parse_bind(arguments.health_bind),
            key=key,
            find_key=find,
            http=GatewayAddress.parse(arguments.http, bind) if arguments.http else None,
        )
        return MasterDaemon(options, notifier).run()
    except (UnifiedError, OSError, ValueError) as error:
        print(f"unified-master: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else os.EX_CONFIG if isinstance(error, OtherStoreError) else 1


def _advertised_host(text: str | None) -> str | None:
    """Return the host of --advertise; UsageError unless it is a name or an address without a port."""
    if text is None:
        return None
    try:
        found = split_address(text)
    except ValueError:
        found = HostPort("*", None)
    if found.host == "*" or found.port is not None or "://" in text:
        raise UsageError(f"--advertise {text!r} is no host: write a name or an address, without a port.")
    return found.host


def _key(addresses: Sequence[str], insecure: bool) -> tuple[ClusterKey | None, Callable[[], ClusterKey | None]]:
    """Return the cluster's key or None, and a function that finds it anew; UsageError if a key is required."""
    beyond = [address for address in addresses if not is_loopback(address)]
    find = functools.partial(find_key, (beyond or addresses)[0])
    key = find()
    warning = check_listening("unified-master", addresses, key, insecure=insecure or may_go_without())
    if warning is not None:
        logging.getLogger("unified.master").warning("event=insecure reason=%r", warning)
    return key, find
