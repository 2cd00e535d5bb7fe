"""How long until ranks work, and how long until they work again, beside torchrun. See benchmarks/README.md."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.bus.work import SETTLE_S, pss_mib
from unified.client.embedded import EmbeddedCluster

HERE = Path(__file__).parent
README = Path(__file__).parents[1] / "README.md"
MARK = "<!-- filled from benchmarks/launch/run.py -->"
END_MARK = "<!-- end of the filled part -->"
RANKS = 2
DDP_RANKS = 4
"""More than the cores of a small machine: as each rank would import the same, an import that all share counts twice."""
DEADLINE_S = 60.0
POLL_S = 0.005
RESTARTS = 3


FLOORS = {
    ("launch_s", "embedded"): 1.6,
    ("plain_s", "embedded"): 1.0,
    ("ddp_s", "embedded"): 1.5,
    ("launch_s", "running"): 8.0,
    ("recovery_s", "running"): 8.0,
}
"""By measurement and contender: how many times as quick as torchrun it is at least, in the same run."""


class MissedDeadlineError(Exception):
    """A contender did not get there in time."""


class Contender(NamedTuple):
    key: str
    title: str
    command: list[str]
    env: dict[str, str]
    script: str = "rank.py"
    ranks: int = RANKS

    def at(self, script: str, ranks: int = RANKS) -> Contender:
        """The same with another script."""
        return self._replace(script=script, ranks=ranks)


class Ready(NamedTuple):
    """One rank that is through its first all_reduce."""

    at: float
    """Wall clock; all processes are on this host."""
    pid: int
    rank: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="measured runs of each (default: 7); one more warms up")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where launch.json goes")
    parser.add_argument("--readme", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--check", action="store_true", help="end with 1 if a floor is missed")
    parser.add_argument("--check-only", action="store_true", help="hold the figures of the last run against the floors")
    args = parser.parse_args()
    file = args.out / "launch.json"
    if args.check_only:
        return check(json.loads(file.read_text()))
    with EmbeddedCluster(nodes=1, devices_per_node=RANKS) as cluster:
        memory = idle_memory_mib(cluster.master_pid, cluster.agent_pids)
        running, own, peer = ours_on(cluster.address), ours_embedded(), torchrun()
        measured = {
            "launch_s": measure("launch", launch, [running, own, peer], args.repeats),
            "recovery_s": measure("recovery", recover, [running, peer], args.repeats),
        }
    # Idle daemons would wake up beside what has one cluster alone.
    for key, script, ranks in (("plain_s", "plain.py", RANKS), ("ddp_s", "ddp.py", DDP_RANKS)):
        pair = [own.at(script, ranks), peer.at(script, ranks)]
        measured[key] = measure(key.removesuffix("_s"), to_the_end, pair, args.repeats)
    result = {"machine": machine(), "ranks": RANKS, "repeats": args.repeats, **measured, "idle_pss_mib": memory}
    args.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1))
    show(result)
    if args.readme:
        fill(README, markdown(result))
    if not all(row["seconds"] for rows in measured.values() for row in rows.values()):
        return 1
    return check(result) if args.check else 0


def check(result: dict[str, Any]) -> int:
    """Print how the figures stand to the floors; the exit code."""
    is_held = True
    for (key, contender), floor in FLOORS.items():
        ratio = times_torchrun(result[key], contender)
        is_held &= ratio >= floor
        word = "pass" if ratio >= floor else "FAIL"
        where = "cluster of its own" if contender == "embedded" else "running cluster"
        print(f"{QUESTIONS[key]}, {where}: {ratio:.2f} × torchrun (≥ {floor:g}): {word}")
    return 0 if is_held else 1


def times_torchrun(rows: dict[str, dict[str, Any]], key: str) -> float:
    """How many times as quick as torchrun a contender is, by medians; NaN if one has none."""
    ours, theirs = (float(statistics.median(rows[name]["seconds"] or [math.nan])) for name in (key, "torchrun"))
    return theirs / ours


def ours_on(address: str) -> Contender:
    return Contender("running", "unified, running cluster", unified_run(), {"UNIFIED_MASTER": address})


def ours_embedded() -> Contender:
    return Contender("embedded", "unified, cluster of its own", unified_run(), {})


def unified_run() -> list[str]:
    return [str(Path(sys.executable).with_name("unified")), "run", "--nnodes=1"]


def torchrun() -> Contender:
    """With the best of its settings for restarts: see `rank.py`."""
    command = [str(Path(sys.executable).with_name("torchrun")), "--nnodes=1"]
    return Contender("torchrun", "torchrun", command, {"BENCH_PREFIX": "1"})


def measure(
    what: str, run: Callable[[Contender, Path], float], contenders: list[Contender], repeats: int
) -> dict[str, dict[str, Any]]:
    """Seconds of each contender, in turn, so that whatever else the machine does hits them all alike."""
    rows: dict[str, dict[str, Any]] = {
        contender.key: {"title": contender.title, "seconds": [], "failures": 0} for contender in contenders
    }
    for attempt in range(repeats + 1):
        for contender in contenders:
            with tempfile.TemporaryDirectory(prefix="unified-bench-") as folder:
                try:
                    seconds = run(contender, Path(folder))
                except MissedDeadlineError as error:
                    rows[contender.key]["failures"] += 1
                    print(f"{what} {attempt}/{repeats} {contender.key}: {error}", file=sys.stderr, flush=True)
                    continue
            note = "" if attempt else " (warm-up, not counted)"
            print(f"{what} {attempt}/{repeats} {contender.key}: {seconds:.3f} s{note}", file=sys.stderr, flush=True)
            if attempt:
                rows[contender.key]["seconds"].append(seconds)
    return rows


def launch(contender: Contender, folder: Path) -> float:
    """From the command to all ranks through their first all_reduce."""
    started = time.time()
    with running(contender, folder, "once") as process:
        ready = wait_for_ranks(folder, after=0.0)
        wait_for_end(process)
    return max(rank.at for rank in ready) - started


def to_the_end(contender: Contender, folder: Path) -> float:
    """From the command to its end."""
    started = time.monotonic()
    with running(contender, folder, "once") as process:
        wait_for_end(process)
        ended = time.monotonic()
        wait_for_ranks(folder, after=0.0, num_ranks=contender.ranks)
    return ended - started


def recover(contender: Contender, folder: Path) -> float:
    """From `kill -9` of rank 1 to all ranks through their first all_reduce after it."""
    with running(contender, folder, "stay") as process:
        victim = next(rank for rank in wait_for_ranks(folder, after=0.0) if rank.rank == 1)
        time.sleep(0.5)  # let the launcher settle into its watching
        killed_at = time.time()
        os.kill(victim.pid, signal.SIGKILL)
        ready = wait_for_ranks(folder, after=killed_at)
        (folder / "stop").touch()
        wait_for_end(process)
    return max(rank.at for rank in ready) - killed_at


@contextmanager
def running(contender: Contender, folder: Path, mode: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command, in a session of its own; whatever is left of it at the end is killed."""
    command = [*contender.command, f"--nproc-per-node={contender.ranks}", f"--max-restarts={RESTARTS}"]
    if contender.key == "torchrun":
        command.append(f"--master-port={free_port()}")
    env = {name: value for name, value in os.environ.items() if name != "UNIFIED_MASTER"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, str(HERE / contender.script), str(folder), mode],
            env={**env, **contender.env, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    except MissedDeadlineError:
        kept = Path(tempfile.gettempdir()) / f"unified-bench-{contender.key}.log"
        shutil.copy(folder / "log", kept)
        print(f"its output: {kept}", file=sys.stderr)
        raise
    finally:
        if process.poll() is None:
            end(process, folder)


def end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Ctrl-C, as a person would; then SIGKILL, also for ranks that outlived it."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for rank in read_ranks(folder):
        if command_of(rank.pid).find(str(folder)) >= 0:
            os.kill(rank.pid, signal.SIGKILL)


def wait_for_ranks(folder: Path, after: float, num_ranks: int = RANKS) -> list[Ready]:
    """The ranks whose first all_reduce came after a moment, once there are all of them."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        ready = [rank for rank in read_ranks(folder) if rank.at > after]
        if len({rank.rank for rank in ready}) == num_ranks:
            return ready
        if time.monotonic() > deadline:
            raise MissedDeadlineError(f"{len(ready)} of {num_ranks} ranks were ready after {DEADLINE_S:g} s")
        time.sleep(POLL_S)


def wait_for_end(process: subprocess.Popen[bytes]) -> None:
    try:
        code = process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise MissedDeadlineError(f"it had not ended {DEADLINE_S:g} s after its ranks") from None
    if code != 0:
        raise MissedDeadlineError(f"it ended with exit code {code}")


def read_ranks(folder: Path) -> list[Ready]:
    return [Ready(**json.loads(file.read_text())) for file in folder.glob("[0-9]*.json")]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def idle_memory_mib(master: int, agents: list[int]) -> dict[str, float]:
    """Proportional set size of the daemons and the zygote, before any job: memory shared by n counts 1/n in each. The
    agent's includes its lease keeper's.
    """
    time.sleep(SETTLE_S)
    sizes = {"master": pss_mib(master), "agent": 0.0, "zygote": 0.0}
    for agent in agents:
        sizes["agent"] += pss_mib(agent)
        for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
            sizes["zygote" if "zygote" in command_of(int(child)) else "agent"] += pss_mib(int(child))
    return {**sizes, "sum": sum(sizes.values())}


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def machine() -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "kernel": platform.release(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


class Line(NamedTuple):
    what: str
    how: str
    median: str
    spread: str
    failures: str
    times: str


def lines(result: dict[str, Any]) -> Iterator[Line]:
    for key, what in QUESTIONS.items():
        for name, row in result[key].items():
            taken = row["seconds"]
            median = statistics.median(taken or [float("nan")])
            spread = f"{min(taken):.2f}–{max(taken):.2f}" if taken else "–"
            failures = f"{row['failures']} of {result['repeats'] + 1}"
            yield Line(
                what, row["title"], f"{median:.3f} s", spread, failures, f"{times_torchrun(result[key], name):.1f}×"
            )


QUESTIONS = {
    "launch_s": "command to all_reduce",
    "recovery_s": "kill -9 of a rank to all_reduce",
    "plain_s": "a script without torch, to its end",
    "ddp_s": f"a step of DDP on {DDP_RANKS} ranks, to its end",
}
TITLE = f"seconds until all of {RANKS} ranks are through an all_reduce, or until the command has ended"
HEADINGS = Line("what", "with", "median", "range, s", "failed", "torchrun ÷ this")


def show(result: dict[str, Any]) -> None:
    table = Table(*HEADINGS, title=TITLE.capitalize())
    for line in lines(result):
        table.add_row(*line)
    console = Console()
    console.print(table)
    console.print(memory_sentence(result))


def memory_sentence(result: dict[str, Any]) -> str:
    memory = result["idle_pss_mib"]
    return (
        f"Idle memory (proportional set size): master {memory['master']:.0f} MiB, "
        f"agent with its lease keeper {memory['agent']:.0f} MiB, "
        f"zygote with torch imported {memory['zygote']:.0f} MiB, together {memory['sum']:.0f} MiB."
    )


def markdown(result: dict[str, Any]) -> str:
    machine = result["machine"]
    rows = [HEADINGS, Line(*["---"] * len(HEADINGS)), *lines(result)]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return (
        f"{TITLE.capitalize()}:\n\n{table}\n\n"
        f"Medians of {result['repeats']} interleaved runs on {machine['cores']} cores, Python "
        f"{machine['python']}, torch {machine['torch']}, {machine['date']}. {memory_sentence(result)}"
    )


def fill(file: Path, text: str, mark: str = MARK) -> None:
    """Put text between a mark of a file and the next end mark."""
    before, _, rest = file.read_text().partition(mark)
    _, _, after = rest.partition(END_MARK)
    file.write_text(f"{before}{mark}\n\n{text}\n\n{END_MARK}{after}")


if __name__ == "__main__":
    sys.exit(main())
