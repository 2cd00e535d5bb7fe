"""``unified profile JOB``: where the time or the memory of one worker goes, as a flame graph or a trace of one step."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser
from pathlib import Path

from unified.cli.options import add_job, add_master, at_least
from unified.cli.show import table, terminal_width
from unified.client.connection import connect_master
from unified.client.profiles import SLACK_S, asked, costs, read_rest
from unified.errors import UsageError
from unified.protocol.client_master import GetJob, JobStatus, LogChunk
from unified.protocol.records import MAX_PROFILE_S, ProfileKind

SAMPLE_S = 10.0
STEP_S = 60.0
NUM_SHOWN = 10
_ENDINGS: dict[str, dict[str, ProfileKind]] = {
    "": {".svg": "flamegraph", ".json": "speedscope"},
    "--memory": {".html": "memory"},
    "--torch": {".json.gz": "torch"},
}
"""Kinds of profiles by option and ending of the file; the first ending is the default."""
_SHOWN_BY = {"speedscope": "at https://www.speedscope.app", "torch": "at https://ui.perfetto.dev"}


def profile_arguments(parser: ArgumentParser) -> None:
    add_job(parser)
    word = "trainer-0, or a rank of the first role; else that role's rank 0."
    parser.add_argument("worker", nargs="?", default="0", metavar="WORKER", help=word)
    add_master(parser)
    text = f"Time to sample (default: {SAMPLE_S:g}); with --torch the time within which a step ends ({STEP_S:g})."
    parser.add_argument("--seconds", type=at_least(1.0), metavar="SECONDS", help=text)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--memory", action="store_true", help="What it allocates in that time and keeps, by memray.")
    kinds.add_argument("--torch", action="store_true", help="One step, by torch.profiler in the worker.")
    text = "The file to write: .svg or .json (speedscope), .html with --memory, .json.gz with --torch."
    parser.add_argument("--output", "-o", metavar="FILE", help=text)


def profile(
    job: str, worker: str, master: str | None, seconds: float | None, memory: bool, torch: bool, output: str | None
) -> None:
    """Write a flame graph of one worker, which runs on meanwhile, and print the functions in which it spends most time.
    Its node needs py-spy, or memray and gdb: the extra `debug`."""
    endings = _ENDINGS["--memory" if memory else "--torch" if torch else ""]
    ending = next((each for each in endings if output is None or output.endswith(each)), None)
    if ending is None:
        raise UsageError(f"this profile is a file *{' or *'.join(endings)}, not {output!r}.")
    if seconds is not None and seconds > MAX_PROFILE_S:
        raise UsageError(f"--seconds {seconds:g}: a profile takes {MAX_PROFILE_S:g} s at most.")
    if output is not None and not Path(output).absolute().parent.is_dir():
        raise UsageError(f"{output} cannot be written: its folder is not there.")
    kind = endings[ending]
    with connect_master(master) as connection:
        status = connection.ask(GetJob(job=job), JobStatus)
        name = f"{status.roles[0].name}-{worker}" if worker.isdecimal() else worker
        print(f"unified: profiling {name} of {status.job_id} …", file=sys.stderr)
        request = asked(status.job_id, name, kind, seconds or (STEP_S if torch else SAMPLE_S))
        data = read_rest(connection, status.job_id, connection.ask(request, LogChunk, timeout_s=SLACK_S))
    output = output or f"{status.job_id}-{name}-{time.strftime('%H%M%S')}{ending}"
    try:
        Path(output).write_bytes(data)
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}.") from None
    print(f"{output}: open it {_SHOWN_BY.get(kind, 'in a browser')}")
    found = costs(kind, data)[:NUM_SHOWN] if kind in ("flamegraph", "speedscope") else []
    if rows := [[f"{share:.1%}", function] for function, share in found if share > 0]:
        print("\n".join(["", *table(["OWN TIME", "FUNCTION"], rows, terminal_width())]))
