"""``unified stack JOB``: the place where each worker of a job stands, grouped by equal stacks, and a verdict."""

from __future__ import annotations

import json as json_module
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from unified.cli.options import add_job, add_json, add_master, at_least
from unified.client.connection import connect_master
from unified.client.terminal import printable
from unified.core.hangs.stacks import by_role, group
from unified.core.hangs.verdict import judge, ranks_text
from unified.protocol.client_master import GetStacks, JobStacks
from unified.protocol.stacks import StackReport

SLACK_S = 5.0
COLUMN = 60
"""Width in characters from which on a terminal shows stacks side by side."""
_NO_STACKS = "no stacks"


class Card(NamedTuple):
    """A stack, and the workers that stand there."""

    title: str
    lines: list[str]


def stack_arguments(parser: ArgumentParser) -> None:
    add_job(parser)
    add_master(parser)
    parser.add_argument("--role", default="", help="Only this role.")
    parser.add_argument("--rank", type=at_least(0), help="Only this rank.")
    parser.add_argument(
        "--all", dest="with_runtime", action="store_true", help="Show the runtime's own threads and frames, too."
    )
    parser.add_argument(
        "--wait", type=at_least(0.1), default=5.0, metavar="SECONDS", help="Time for hosts to answer (default: 5)."
    )
    add_json(parser)


def stack(
    job: str, master: str | None, role: str, rank: int | None, with_runtime: bool, wait: float, json: bool
) -> None:
    """Show where each worker of a job stands: the stacks of its threads, equal ones once, and who waits for whom."""
    with connect_master(master) as connection:
        request = GetStacks(job=job, role=role, rank=rank, wait_s=wait)
        found = connection.ask(request, JobStacks, timeout_s=wait + SLACK_S)
    if json:
        print(json_module.dumps(as_data(found), indent=2))
        return
    for name, report in by_role(found.report).items():
        print("\n".join(printable(line) for line in head_lines(name, report)))
        _print_cards(cards(report, with_runtime=with_runtime))


def head_lines(role: str, report: StackReport) -> list[str]:
    """Return the role, the verdict on it, and notes about single workers."""
    verdict = judge(report.workers)
    said = set(verdict.findings)
    notes = [f"rank {worker.rank}: {worker.note}" for worker in report.workers if worker.note]
    shown = [note for note in notes if not any(note.partition(": ")[2] in finding for finding in said)]
    num = len(report.workers)
    return [f"{role}: {num} worker{'s' if num != 1 else ''}", *(f"  {line}" for line in (*verdict.findings, *shown))]


def cards(report: StackReport, *, with_runtime: bool = False) -> list[Card]:
    """Return a card for each group of equal stacks, and one for the workers without a stack."""
    total = len(report.workers)
    found = [
        Card(
            f"{ranks_text(each.workers)} ({len(each.workers)} of {total}), {', '.join(each.threads[:3])}",
            each.frames,
        )
        for each in group(report, with_runtime=with_runtime)
    ]
    if without := [worker for worker in report.workers if not worker.threads]:
        found.append(Card(f"{ranks_text(without)} ({len(without)} of {total})", [_NO_STACKS]))
    return found


def as_data(found: JobStacks) -> dict[str, Any]:
    """Return everything as plain data: workers with their stacks, groups, and the verdict on each role."""
    stacks = found.report.stacks
    roles = {
        name: {
            "findings": (verdict := judge(report.workers)).findings,
            "culprits": [worker.worker for worker in verdict.culprits],
            "groups": [
                {
                    "frames": each.frames,
                    "threads": each.threads,
                    "workers": [worker.worker for worker in each.workers],
                    "is_main": each.is_main,
                }
                for each in group(report)
            ],
        }
        for name, report in by_role(found.report).items()
    }
    workers = []
    for worker in found.report.workers:
        plain = msgspec.to_builtins(worker)
        for thread in plain["threads"]:
            thread["frames"] = stacks[thread.pop("stack")].splitlines()
        workers.append(plain)
    return {"job": found.job_id, "roles": roles, "workers": workers}


def _print_cards(found: Sequence[Card]) -> None:
    if not sys.stdout.isatty():
        for card in found:
            print("\n".join(["", f"  {printable(card.title)}", *(f"    {printable(line)}" for line in card.lines)]))
        print()
        return
    from rich.columns import Columns
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    console = Console(highlight=False)
    side_by_side = max(1, min(len(found), console.width // COLUMN))
    texts = [Text("\n".join(map(printable, card.lines))) for card in found]  # it drops line ends
    titles = [Text(printable(card.title)) for card in found]
    panels = [Panel(text, title=title, title_align="left") for text, title in zip(texts, titles, strict=True)]
    console.print(Columns(panels, width=console.width // side_by_side - 1, padding=(0, 0)))
