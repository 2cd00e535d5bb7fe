"""``unified simulate``: a cluster of training jobs under faults, in virtual time, with the real decisions."""

from __future__ import annotations

import subprocess
from argparse import ArgumentParser
from importlib import import_module
from typing import Any

import msgspec

from unified.cli.options import add_json, at_least
from unified.config.settings import python
from unified.errors import UsageError
from unified.lazy import needed_by


def simulate_arguments(parser: ArgumentParser) -> None:
    def number(flag: str, default: float, metavar: str, text: str, *, lowest: float = 0) -> None:
        kind = at_least(type(default)(lowest))
        parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=f"{text} ({default:g}).")

    number("--nodes", 1000, "N", "Nodes", lowest=1)
    number("--workers", 8, "N", "Workers, and devices, of each node", lowest=1)
    number("--hours", 24.0, "H", "Virtual hours under faults", lowest=0.01)
    number("--job-hours", 12.0, "H", "Useful hours of work of a job; another then takes its place", lowest=0.01)
    number("--checkpoint-minutes", 30.0, "M", "Minutes between checkpoints; a job goes on from the last", lowest=0.01)
    number("--spare", 0.02, "PART", "Part of the nodes that jobs leave free")
    number("--node-days", 50.0, "D", "Days between two deaths of one node; 0: none. So too below")
    number("--rack-days", 365.0, "D", "Days between two deaths of one rack, all nodes together")
    number("--rack-size", 16, "N", "Nodes of a rack", lowest=1)
    number("--worker-days", 400.0, "D", "Days between two deaths of one worker alone")
    number("--cut-days", 500.0, "D", "Days between two cuts of one node's network, each for up to two minutes")
    number("--master-days", 1.0, "D", "Days between two deaths of the master, each for up to 30 s")
    number("--repair-hours", 2.0, "H", "Hours until a dead node is back", lowest=0.01)
    number("--delay-ms", 1.0, "MS", "Time of a message on the network", lowest=0.01)
    number("--loss", 0.0001, "PART", "Part of the packets that have to be sent again")
    number("--seed", 1, "N", "Seed: the same gives the same run")
    parser.add_argument(
        "--job-nodes",
        type=_sizes,
        default=[1, 8, 64],
        metavar="N,N,…",
        help="Nodes of the jobs, in turns, until the cluster is full (1,8,64).",
    )
    parser.add_argument("--in-place", action="store_true", help="Loops of jobs go on in place after a peer's death.")
    parser.add_argument("--transcript", metavar="FILE", help="Write down every decision and fault.")
    add_json(parser)


def _sizes(text: str) -> list[int]:
    return [at_least(1)(word) for word in text.split(",")]


def simulate(json: bool, transcript: str | None, **options: Any) -> int:
    """Run a whole cluster in virtual time: the real decisions of master and agents, simulated hosts and faults.

    Shows what a cluster of that size, with faults at these rates, spends on useful work, and what its master needs. The
    invariants of the runtime are checked all the while; one that breaks ends the run with exit code 1.
    """
    try:
        with needed_by("unified simulate"):
            import_module("unified_simulator")
    except ModuleNotFoundError as error:
        raise UsageError(str(error)) from None
    words = [python(), "-m", "unified_simulator", msgspec.json.encode(options).decode(), transcript or ""]
    return subprocess.call([*words, "--json"] if json else words)
