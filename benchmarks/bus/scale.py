"""A cluster of thousands of inboxes on one machine: what the directory costs, and what a call does beside it.

A real master and a real agent with two workers; all other agents are sockets of one load process, and their workers
exist only on paper. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks import report_table
from benchmarks.bus import work
from benchmarks.bus.report import short
from benchmarks.bus.scale_job import CALLS, READINGS
from benchmarks.launch.run import fill, machine
from unified.api.builder import DLJob, DLJobBuilder
from unified.client.embedded import EmbeddedCluster
from unified.client.handle import JobHandle
from unified.core.directory import WorkerDirectory
from unified.errors import MasterUnreachableError
from unified.protocol.records import DirectoryEntry, Inbox, Reachability

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
MARK = "<!-- filled from benchmarks/bus/scale.py -->"
DEADLINE_S = 240.0
CALM_S = 5.0
WINDOW_S = 10.0
POLL_S = 0.05
MEASURES = {
    "nodes": "agents on paper",
    "register_s": "all registered, s",
    "run_s": "submit to running, s",
    "entry_bytes": "an entry, B",
    "largest_message_kib": "largest message to an agent, KiB",
    "sent_a_node_kib": "all that an agent was sent, KiB",
    "directory_mib": "directory in a worker, MiB",
    "lookup_ns": "look-up, ns",
    "master_cpu": "CPU of the master, % of a core",
    "master_pss_mib": "memory of the master (PSS), MiB",
    "p50_us": "call p50, µs",
    "p99_us": "call p99, µs",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inboxes", type=int, nargs="+", default=[0, 1000, 5000], help="runs (default: 0 1000 5000)")
    parser.add_argument("--per-node", type=int, default=8, help="inboxes of one agent (default: 8)")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where bus_scale.json goes")
    parser.add_argument("--readme", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each agent is a socket of the master's
    before = machine()
    runs = []
    for inboxes in args.inboxes:
        runs.append(run(inboxes, args.per_node))
        print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    result = {"machine": before, "per_node": args.per_node, "runs": runs}
    (args.out / "bus_scale.json").write_text(json.dumps(result, indent=1))
    report_table.show(headings(runs), lines(runs), [], footnote(result), 120, title="One run each")
    if args.readme:
        fill(README, report_table.markdown(headings(runs), lines(runs), footnote(result)), MARK)
    return 0


def headings(runs: Sequence[dict[str, Any]]) -> list[str]:
    return ["", *(f"{count(run['inboxes'])} inboxes" for run in runs)]


def lines(runs: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    for name, title in MEASURES.items():
        yield [title, *(_cell(run.get(name)) for run in runs)]


def footnote(result: dict[str, Any]) -> str:
    here = result["machine"]
    return (
        f"One run each, {result['per_node']} inboxes an agent, a heartbeat a second for every inbox, {READINGS} "
        f"readings of {count(CALLS)} calls, on {here['cores']} cores, Python {here['python']}, {here['date']}, load "
        f"{here['load_1min']} at the start."
    )


def count(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def _cell(value: float | None) -> str:
    if value is None:
        return "–"
    return count(value) if isinstance(value, int) else short(value)


def run(inboxes: int, per_node: int) -> dict[str, Any]:
    """A cluster of its own: everything registered, one job over all of it, then the readings."""
    nodes = -(-inboxes // per_node)
    found: dict[str, Any] = {"inboxes": inboxes, "nodes": nodes, **directory_costs(inboxes)}
    with (
        tempfile.TemporaryDirectory(prefix="unified-scale-") as name,
        EmbeddedCluster(nodes=1, devices_per_node=2) as cluster,
        load(cluster.address, nodes, per_node) as (told, say),
    ):
        time.sleep(work.SETTLE_S)
        folder = Path(name)
        master = psutil.Process(cluster.master_pid)
        until(lambda: not nodes or told().get("register_s"), f"{nodes} agents registered", told)
        began = time.monotonic()
        with job(folder, inboxes).submit("scale", blocking=False, master=cluster.address) as handle:
            until(lambda: is_running(handle), "the job runs", told)
            until(lambda: told().get("running", 0) >= inboxes, f"{inboxes} workers run", told)
            found["run_s"] = time.monotonic() - began
            say("")
            time.sleep(CALM_S)
            found["master_cpu"] = cpu_percent(master)
            found["master_pss_mib"] = work.pss_mib(master.pid)
            found |= told()
            (folder / "go").touch()
            until((folder / "figures").exists, "the calls were made", told)
            found |= json.loads((folder / "figures").read_text())
            handle.stop(force=True)
    return found


def directory_costs(number: int) -> dict[str, float]:
    """Of a worker's directory: bytes of an entry on the wire, memory of all, and time to find one."""
    if number == 0:
        return {}
    host = "x" * 56
    encoded = [
        msgspec.msgpack.encode(
            DirectoryEntry(
                worker=f"sim_{number}-{index}_1-0",
                incarnation=0,
                state=Reachability.ALIVE,
                inbox=Inbox(
                    inbox_id=f"{index:024x}",
                    routes=[f"ipc:///run/user/1000/unified/{index:024x}.bus", f"tcp://10.0.{index >> 8}.1:45678"],
                    host_id=f"{host}{index:04d}",
                ),
                node=f"sim-{index}",
            )
        )
        for index in range(number)
    ]
    tracemalloc.start()
    directory = WorkerDirectory()
    directory.merge(msgspec.msgpack.decode(entry, type=DirectoryEntry) for entry in encoded)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    names = [f"sim_{number}-{index}_1-0" for index in range(0, number, 7)]

    def look_up() -> float:
        began = time.perf_counter()
        for name in names:
            directory.reachable(name)
        return (time.perf_counter() - began) / len(names) * 1e9

    return {
        "entry_bytes": sum(map(len, encoded)) / number,
        "directory_mib": held / 2**20,
        "lookup_ns": work.read(look_up),
    }


def end(process: subprocess.Popen[str], within_s: float) -> None:
    """Have a process end by the end of its stdin; kill one that does not in time."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def load(
    master: str, nodes: int, per_node: int, program: Sequence[str | Path] = (HERE / "scale_load.py",)
) -> Iterator[tuple[Callable[[], dict[str, Any]], Callable[[str], None]]]:
    """The load process; what is yielded tells its newest totals, and says a line to it: an empty one has it send a
    heartbeat for every inbox."""
    if nodes == 0:
        yield dict, lambda line: None
        return
    process = subprocess.Popen(
        [sys.executable, *program, master, str(nodes), str(per_node)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    newest: dict[str, Any] = {}

    def listen() -> None:
        for line in process.stdout or ():
            newest.update(json.loads(line))
        newest["has_ended"] = True

    def say(line: str) -> None:
        if process.stdin is not None:
            process.stdin.write(f"{line}\n")
            process.stdin.flush()

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield lambda: dict(newest), say
    finally:
        end(process, 20)
        listener.join()
        if process.stdout is not None:
            process.stdout.close()


def until(is_true: Callable[[], object], what: str, told: Callable[[], dict[str, Any]]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        if time.monotonic() > deadline or told().get("has_ended"):
            raise SystemExit(f"it did not come to this: {what}; the load process says {told()}")
        time.sleep(POLL_S)


def is_running(handle: JobHandle) -> bool:
    try:
        return handle.status().stage == "RUNNING"
    except MasterUnreachableError:  # it is busy telling everybody
        return False


def cpu_percent(process: psutil.Process) -> float:
    before, began = process.cpu_times(), time.monotonic()
    time.sleep(WINDOW_S)
    after, ended = process.cpu_times(), time.monotonic()
    return 100 * (sum(after[:2]) - sum(before[:2])) / (ended - began)


def job(folder: Path, inboxes: int) -> DLJob:
    builder = (
        DLJobBuilder()
        .node_num(max(1, inboxes))
        .device_per_node(2)
        .device_type("CPU")
        .config({"folder": str(folder)})
        .role("caller")
        .run("benchmarks.bus.scale_job.Caller")
        .resource(accelerator=1)
        .role("callee")
        .run("benchmarks.bus.scale_job.Callee")
        .resource(accelerator=1)
        .not_driver()
    )
    if inboxes:
        builder = (
            builder.role("sim").run("benchmarks.bus.scale_job.Callee").total(inboxes).resource(user_defined={"sim": 1})
        )
        builder = builder.not_driver()
    built: DLJob = builder.build()
    return built


if __name__ == "__main__":
    sys.exit(main())
