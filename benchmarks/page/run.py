"""The page of a large cluster in a browser, and its costs, beside Ray's dashboard. See benchmarks/README.md."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from benchmarks import program
from benchmarks.bus.work import pss_mib, wanted
from benchmarks.gateway.servers import TOKEN, CountedMaster, process
from benchmarks.page import rays, report, viewers
from benchmarks.page.cluster import PER_NODE, PaperCluster, Usage, child, cluster

SETTLE_S = 3.0
PROBES = 8
"""Events of a window that are timed until they are on the screen."""
PROBE_S = (0.7, 1.9)
"""Time between two of them, at random."""
READ_STEP = """() => [...document.querySelectorAll(".role-row")]
    .find((row) => row.querySelector("b")?.textContent === "probe")
    ?.querySelector(".numbers b")?.textContent.replace(/\\D/g, "")"""
"""The step of the role `probe`, which tells a time."""
PAGES = {
    "/": ".strip",
    "/jobs": ".table-body .row",
    "/nodes": ".table-body .row, .grid canvas",
    "/jobs/{job}": ".grid canvas",
    "/jobs/{job}/workers": ".table-body .row",
}
"""What each page has when it can be used."""
BROKEN = (OSError, RuntimeError, TimeoutError)
Reading = tuple[str, str, float]
"""Contender, row, value."""


def main() -> int:
    parser = program.parser(__doc__, report.NAMES)
    parser.set_defaults(rounds=3)
    parser.add_argument("--nodes", type=int, default=report.NODES, help=f"of {PER_NODE} workers each (default: 1250)")
    parser.add_argument("--ended", type=int, default=report.ENDED, help="jobs that have ended (default: 1000)")
    parser.add_argument(
        "--changes", type=float, default=report.CHANGES, help="workers a second that report (default: 500)"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="length of one reading (default: 10)")
    parser.add_argument("--actors", type=int, default=100, help="of Ray; 0: leave it out (default: 100)")
    args = parser.parse_args()

    def measure() -> tuple[program.Figures, list[str]]:
        figures: program.Figures = {contender: {} for contender in report.CONTENDERS}
        problems: list[str] = []

        def take(readings: Iterator[Reading], what: str) -> None:
            began = time.perf_counter()
            try:
                for contender, row, value in readings:
                    if wanted(row, rows=args.rows):
                        figures[contender].setdefault(row, []).append(value)
            except BROKEN as error:
                problems.append(f"{what}: {type(error).__name__}: {error}")
            print(f"{what}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)

        with (
            tempfile.TemporaryDirectory(prefix="unified-bench-") as folder,
            cluster(Path(folder), args.nodes, args.ended, args.changes) as paper,
        ):
            for number in range(args.rounds):
                take(measure_round(paper, Path(folder), args.seconds), f"round {number + 1}/{args.rounds}")
        if args.actors:
            take(rays.measure(args.actors, args.seconds, args.rounds), "Ray")
        return figures, problems

    sizes = {"workers": args.nodes * PER_NODE, "nodes": args.nodes, "changes": args.changes, "ended": args.ended}
    more = {**sizes, "actors": args.actors, "ray": rays.VERSION}
    return program.run("page", args, measure, report, report.verdicts, **more)


def measure_round(paper: PaperCluster, folder: Path, seconds: float) -> Iterator[Reading]:
    """Every column once, each gateway new."""
    time.sleep(SETTLE_S)
    with window(paper) as found:
        time.sleep(seconds)
    yield from found.of("none")
    with gateway(paper, folder) as (counted, port, streams):
        for name, number in (("one", 1), ("twenty", report.VIEWERS)):
            for index in range(streams.number, number):
                streams.open("" if index % 2 else paper.job_id)
            time.sleep(SETTLE_S)
            with window(paper, counted) as found:
                time.sleep(seconds)
            yield from found.of(name)
    with gateway(paper, folder) as (counted, port, streams), viewers.browser(streams.cookie, port) as context:
        tab, origin = viewers.Tab(context, READ_STEP), f"http://127.0.0.1:{port}"
        yield "browser", "cold_s", tab.open(f"{origin}/", PAGES["/"])
        for index in range(1, report.VIEWERS):
            streams.open("" if index % 2 else paper.job_id)
        time.sleep(SETTLE_S)
        yield "browser", "first_s", tab.open(f"{origin}/", PAGES["/"])
        job_page = f"{origin}/jobs/{paper.job_id}"
        yield "browser", "job_s", tab.open(job_page, PAGES["/jobs/{job}"])
        time.sleep(SETTLE_S)
        with window(paper, counted) as found:
            heaps = send_probes(paper, tab)
        yield from found.of("browser")
        late = latencies(tab, paper.told()["epoch"])
        yield "browser", "update_s", median(late)
        yield "browser", "update_most_s", max(late)
        yield "browser", "heap_mb", max(heaps)
        counts = []
        for path, selector in PAGES.items():
            tab.open(origin + path.format(job=paper.job_id), selector)
            time.sleep(1)
            counts.append(tab.elements())
        yield "browser", "elements", max(counts)


class Window:
    """Reading of one period, in rows."""

    def __init__(self) -> None:
        self.rows: dict[str, float] = {}

    def of(self, contender: str) -> Iterator[Reading]:
        for row, value in self.rows.items():
            yield contender, row, value


@contextmanager
def window(paper: PaperCluster, counted: CountedMaster | None = None) -> Iterator[Window]:
    """What the body's time costs the master, its agents and a gateway."""
    found, told = Window(), paper.read_heartbeats()
    began, changes = time.monotonic(), told["changes"]
    master, num_bytes = Usage(paper.master), counted.num_bytes if counted else 0
    of_gateway = Usage(child("unified_gateway")) if counted else None
    yield found
    took = time.monotonic() - began
    found.rows["master_cpu"] = master.percent()
    if counted and of_gateway:
        found.rows["master_kb_s"] = (counted.num_bytes - num_bytes) / took / 1000
        found.rows["gateway_cpu"] = of_gateway.percent()
        found.rows["gateway_mb"] = pss_mib(of_gateway.pid) * 2**20 / 1e6
    told = paper.read_heartbeats()
    found.rows |= {name: told[name] for name in ("beat_p50", "beat_p99")}
    rate = (told["changes"] - changes) / took
    if rate < 0.9 * paper.changes:
        raise RuntimeError(f"the agents came to {rate:.0f} changes a second alone: the machine is too busy")


@contextmanager
def gateway(paper: PaperCluster, folder: Path) -> Iterator[tuple[CountedMaster, int, viewers.Streams]]:
    """A new gateway, behind a relay that counts, without viewers."""
    counted, address = CountedMaster(paper.address), folder / f"gateway-{time.monotonic_ns()}"
    command = ["-m", "unified_gateway", "--master", counted.address, "--port", "0", "--die-with-parent"]
    with ExitStack() as stack:
        stack.callback(counted.close)
        environment = {"TRAINER_API_TOKEN": TOKEN}
        port = stack.enter_context(process([*command, "--address-file", str(address)], address, environment))
        streams = viewers.Streams(port, viewers.sign_in(port, TOKEN))
        stack.callback(streams.close)
        yield counted, port, streams


def send_probes(paper: PaperCluster, tab: viewers.Tab) -> list[float]:
    """Have the probe report its time, now and then; the heap at these moments."""
    heaps = []
    for _ in range(PROBES):
        paper.say("probe")
        tab.page.wait_for_timeout(1000 * random.uniform(*PROBE_S))
        heaps.append(tab.heap_mb())
    tab.page.wait_for_timeout(2000)
    return heaps


def latencies(tab: viewers.Tab, epoch: float) -> list[float]:
    """Seconds from what the probe reported to the screen."""
    found = [at - epoch - int(text) / 1000 for text, at in tab.told()[1:]]  # the first was there already
    if len(found) < PROBES / 2:
        raise RuntimeError(f"of {PROBES} events the page showed {len(found)}")
    return found


if __name__ == "__main__":
    sys.exit(main())
