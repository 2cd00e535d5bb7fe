"""``unified doctor``: what is wrong on this host, and between it and the cluster, with what to do."""

from __future__ import annotations

import os
import socket
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from unified.cli.options import add_json, add_master
from unified.cli.show import print_json
from unified.config.addresses import find_master
from unified.config.logging import escaped
from unified.doctor import Finding, Severity, examine_cluster, examine_host
from unified.doctor.judgement import untested
from unified.errors import UsageError

SIGNS = dict(zip(Severity, (("✓", "green"), ("!", "yellow"), ("✗", "red"), ("–", "dim")), strict=True))


def doctor_arguments(parser: ArgumentParser) -> None:
    add_master(parser)
    parser.add_argument("--host", action="store_true", help="Look at this host alone: no master is needed.")
    text = "A daemon's --state-dir or --log-dir, in place of UNIFIED_HOME; may be given several times."
    parser.add_argument("--folder", type=Path, action="append", default=[], metavar="DIR", help=text)
    text = "Print what is wrong and nothing else, a line each behind this host's name, or its node's in SLURM."
    parser.add_argument("--quiet", action="store_true", help=text)
    add_json(parser)


def doctor(master: str | None, host: bool, folder: list[Path], quiet: bool, json: bool) -> int:
    """Say what is wrong on this host, and between it and the cluster, before a job hangs, and what to do. The exit code
    is 1 if something is wrong, and 0 if all is fine, or costs something at most.
    """
    if host and master:
        raise UsageError("--host looks at this host alone, and --master names a master: give one of them.")
    address = None if host else find_master(master)
    found = examine_host(folder, address or "*")
    if address is not None:
        found += examine_cluster(address)
    elif not host:
        found.append(untested("no master is named", "Give --master tcp://HOST:PORT, or set UNIFIED_MASTER.", "master"))
    found = [structs.replace(each, what=escaped(each.what), advice=escaped(each.advice)) for each in found]
    if json:
        print_json(found)
    elif quiet:
        name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        for each in [each for each in found if each.severity == Severity.WRONG]:
            print(f"unified doctor: node {name}: {each.check}: {each.what} {each.advice}", flush=True)
    else:
        _print(found)
    return int(any(each.severity == Severity.WRONG for each in found))


def _print(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    console, width = Console(), max(len(each.check) for each in findings)
    for each in findings:
        mark, colour = SIGNS[each.severity] if console.is_terminal else (f"{each.severity:8}", "")
        line = Text.assemble((mark, colour), f"  {each.check:{width}}  {each.what}")
        if each.advice:
            line.append(f"\n{'':{len(mark) + width + 4}}{each.advice}", "dim")
        console.print(line, soft_wrap=True)
