"""``unified up`` and ``unified down``: a cluster of this host that stays until it has had no job for some time."""

from __future__ import annotations

import sys
from argparse import ArgumentParser

from unified.cli.options import at_least
from unified.client.report import duration_text
from unified.config.clusters import ClusterRecord, kept_cluster
from unified.devices import VIRTUAL_DEVICES, has_accelerator
from unified.errors import ClusterError, UsageError

IDLE_S = 3600.0


def up_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--nodes", type=at_least(1), metavar="N", help="How many agents there are (1).")
    parser.add_argument(
        "--devices", type=at_least(1), metavar="N", help="Virtual devices of each; else the real ones, or 8."
    )
    parser.add_argument(
        "--idle", type=at_least(0.0), metavar="S", help="End after so many seconds without a job (3600); 0: never."
    )


def up(nodes: int | None, devices: int | None, idle: float | None) -> None:
    """Start a cluster on this host that stays when the command returns, one for each user.

    Whatever submits a job or looks at one finds it by itself, if neither --master nor UNIFIED_MASTER names another.
    """
    if (kept := kept_cluster()) is not None:
        print(f"{kept.address}  is up already: {shape(kept)}")
        asked = {"nodes": (nodes, kept.nodes), "devices": (devices, kept.devices), "idle": (idle, kept.idle_s)}
        if different := [name for name, (wanted, has) in asked.items() if wanted not in (None, has)]:
            options = " and ".join(f"--{name}" for name in different)
            print(f"unified up: it was started with other {options}; `unified down` ends it first.", file=sys.stderr)
        return
    if devices is None:
        is_real = has_accelerator()
        if is_real and (nodes or 1) > 1:
            raise UsageError("each node would take all accelerators of this host: say how many with --devices.")
        devices = None if is_real else VIRTUAL_DEVICES
    from unified.client.keeper import start_keeper

    kept = start_keeper(nodes or 1, devices, IDLE_S if idle is None else idle)
    print(f"{kept.address}  is up: {shape(kept)}")


def shape(kept: ClusterRecord) -> str:
    """``1 node of 2 devices; ends after 1 h 0 min without a job; logs: …``."""
    nodes = f"{kept.nodes} node{'s' if kept.nodes != 1 else ''}"
    devices = f" of {kept.devices} device{'s' if kept.devices != 1 else ''}" if kept.devices else ""
    end = f"ends after {duration_text(kept.idle_s)} without a job" if kept.idle_s else "stays until `unified down`"
    return f"{nodes}{devices}; {end}; logs: {kept.home}"


def down_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="End it although jobs run, and these with it.")


def down(force: bool) -> None:
    """End the cluster that `unified up` started."""
    kept = kept_cluster()
    if kept is None:
        print("no cluster is up")
        return
    from unified.client.keeper import stop_keeper, unfinished

    jobs = [] if force else unfinished(kept)
    if jobs:
        raise ClusterError(
            f"jobs of this cluster have not ended: {', '.join(job.job_id for job in jobs)}. `unified stop JOB` stops "
            "one; `unified down --force` ends all with the cluster."
        )
    stop_keeper(kept)
    print(f"{kept.address}  is down")
