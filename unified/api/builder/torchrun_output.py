"""torchrun's `--log-dir`, `--redirects`, `--tee` and `--local-ranks-filter`, as a role's description."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from typing import Any

from unified.errors import UsageError

OUTPUT_OPTIONS = {"log_dir", "redirects", "tee", "local_ranks_filter"}
_ONE = re.compile(r"[0-3]\Z")
_MAP = re.compile(r"\d+:[0-3](,\d+:[0-3])*\Z")
_RANKS = re.compile(r"\d+(,\d+)*\Z")


def output_files(args: Namespace, prog: str, nproc: int) -> dict[str, Any] | None:
    """The description of a role's `output_files`; None where the options say nothing.

    Args:
        prog: what messages call the program.
        nproc: workers on each node, for a value that is meant for all of them.

    Raises:
        UsageError: a value has none of the forms that torchrun takes.
    """
    redirects = _streams(args.redirects, prog, "--redirects", nproc)
    tee = _streams(args.tee, prog, "--tee", nproc)
    ranks = _local_ranks(args.local_ranks_filter, prog)
    if args.log_dir == os.devnull:  # torchrun then writes no file, and shows it all
        redirects, tee = {}, {}
    log_dir = os.path.abspath(args.log_dir) if args.log_dir and args.log_dir != os.devnull else ""
    if os.path.isfile(log_dir):
        raise UsageError(f"{prog}: --log-dir={args.log_dir} is a file: name a folder.")
    if not (log_dir or redirects or tee or ranks):
        return None
    return {
        "log_dir": log_dir,
        "run_id": str(args.rdzv_id or "none").replace("/", "_"),
        "redirects": redirects,
        "tee": tee,
        "local_ranks": ranks,
        "label": args.role,
    }


def _streams(text: str, prog: str, option: str, nproc: int) -> dict[int, int]:
    """Local rank → 1 for stdout, 2 for stderr, 3 for both."""
    if _ONE.match(text):
        return dict.fromkeys(range(nproc), int(text)) if int(text) else {}
    if not _MAP.match(text):
        raise UsageError(
            f"{prog}: {option}={text} is neither one of 0 (none), 1 (stdout), 2 (stderr), 3 (both), nor such a number "
            "for some local ranks: 0:1,1:2."
        )
    pairs = (pair.split(":") for pair in text.split(","))
    return {int(rank): int(streams) for rank, streams in pairs if int(streams)}


def _local_ranks(text: str, prog: str) -> list[int]:
    if text and not _RANKS.match(text):
        raise UsageError(f"{prog}: --local-ranks-filter={text} is no list of local ranks, such as 0,1.")
    return sorted({int(rank) for rank in text.split(",")}) if text else []
