"""`unified-master`: flags and environment to options, then the daemon."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from unified import process
from unified.config import settings
from unified.config.addresses import parse_flag
from unified.config.logging import logging_level
from unified.config.runtime import RuntimeSettings
from unified.core.coordinator.workers import HeartbeatTimes
from unified.errors import UnifiedError
from unified.security.keys import ClusterKey, check_listening, find_key, is_loopback, may_go_without
from unified_master.daemon import MasterDaemon, MasterOptions
from unified_master.gateway_process import GatewayAddress
from unified_master.store import back_up


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `unified-master`'s flags."""
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
        logging.basicConfig(
            level=logging_level(arguments.log_level, os.environ),
            stream=sys.stderr,
            format="%(asctime)s master %(levelname)s %(message)s",
        )
        state_dir = arguments.state_dir or settings.home() / "master"
        if arguments.backup is not None:
            back_up(state_dir, arguments.backup)
            return 0
        coordinator = RuntimeSettings.load_shared().coordinator
        bind = parse_flag("--bind", arguments.bind or coordinator.address).url
        relay_bind = parse_flag("--relay-bind", arguments.relay_bind).url if arguments.relay_bind else None
        options = MasterOptions(
            bind=bind,
            state_dir=state_dir,
            intervals=settings.intervals(),
            worker_heartbeats=HeartbeatTimes(
                coordinator.heartbeat_interval_ms / 1000, coordinator.heartbeat_timeout_ms / 1000
            ),
            relay_bind=relay_bind,
            address_file=arguments.address_file,
            key=_key([bind, relay_bind or bind], arguments.insecure),
            http=GatewayAddress.parse(arguments.http, bind) if arguments.http else None,
        )
        return MasterDaemon(options).run()
    except (UnifiedError, OSError, ValueError) as error:
        print(f"unified-master: {error}", file=sys.stderr)
        return 1


def _key(addresses: Sequence[str], insecure: bool) -> ClusterKey | None:
    """Return the cluster's key, if there is one; raise UsageError where there has to be one."""
    beyond = [address for address in addresses if not is_loopback(address)]
    key = find_key((beyond or addresses)[0])
    warning = check_listening("unified-master", addresses, key, insecure=insecure or may_go_without())
    if warning is not None:
        logging.getLogger("unified.master").warning("event=insecure reason=%r", warning)
    return key
