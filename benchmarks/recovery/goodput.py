"""Share of the time that goes into useful steps while ranks, agents and the master are killed every ten seconds."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.launch.run import machine
from benchmarks.recovery import work
from benchmarks.recovery.supervised import SupervisedCluster
from unified import DLJobBuilder
from unified.client.handle import JobHandle

ROOT = Path(__file__).parents[2]
NANOGPT = ROOT / "examples/nanogpt"
FLOOR = 0.9
MOST = 100
"""Limit of restarts, which nobody who trains for long would set lower."""
PAUSE_STEPS = 3
"""Undisturbed steps after which the time without a step counts as a pause, and not as a slow step."""
CALM_S = 20.0
"""Time before the first kill, from which the length of an undisturbed step is taken."""
KINDS = ("rank", "agent", "master")


class Kill(NamedTuple):
    at: float
    kind: str
    what: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="with kills, after 20 s without (default: 300)")
    parser.add_argument("--every", type=float, default=10.0, help="seconds from one kill to the next (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="of what is killed, and when (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where goodput.json and goodput.svg go")
    parser.add_argument("--check", action="store_true", help=f"end with 1 below {FLOOR:.0%}%")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unified-bench-") as name:
        steps, kills, code = train(Path(name), args.seconds, args.every, random.Random(args.seed))
    result = {"machine": machine(), "seed": args.seed, "exit_code": code, **account(steps, kills)}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "goodput.json").write_text(json.dumps(result, indent=1))
    plot(steps, kills, result, args.out / "goodput.svg")
    show(result, args.out / "goodput.svg")
    return int(args.check and (code != 0 or result["goodput"] < FLOOR))


def train(folder: Path, seconds: float, every: float, rng: random.Random) -> tuple[list[work.Step], list[Kill], int]:
    """Train on two nodes, and kill; the steps, the kills and the job's exit code."""
    prepare(folder)
    kills: list[Kill] = []
    with SupervisedCluster(folder, nodes=2, devices=2) as cluster, Progress(transient=True) as progress:
        handle = submit(cluster.address, folder)
        work.wait_for_steps(folder, 1)
        bar = progress.add_task("training", total=CALM_S + seconds)
        began = time.monotonic()
        due = CALM_S
        while (passed := time.monotonic() - began) < CALM_S + seconds:
            progress.update(bar, completed=passed, description=f"{len(kills)} kills")
            if passed >= due:
                due += every
                if (kill := kill_one(cluster, rng)) is not None:
                    kills.append(kill)
                    progress.console.print(f"{passed:6.1f} s: killed {kill.what}")
            time.sleep(0.05)
        (folder / "stop").touch()
        code = handle.wait(timeout=work.WITHIN_S)
        handle.close()
    return work.read(folder), kills, code


def prepare(folder: Path) -> None:
    """Write the windows of text that ranks train on."""
    sys.path.insert(0, str(NANOGPT))
    import text  # type: ignore[import-not-found]  # of the example

    from benchmarks.recovery.goodput_job import CONTEXT, ROWS

    text.prepare(None, folder / "data", CONTEXT, limit_mb=2)
    with (folder / "data/train.jsonl").open() as lines:
        rows = np.array([list(json.loads(line)["text"].encode("latin-1")) for line in lines], dtype=np.int64)
    np.save(folder / ROWS, rows)


def submit(address: str, folder: Path) -> JobHandle:
    from benchmarks.recovery.goodput_job import FOLDER

    builder: Any = DLJobBuilder().node_num(2).device_per_node(2).device_type("CPU")
    builder = builder.global_env({FOLDER: str(folder), "PYTHONPATH": f"{ROOT}:{NANOGPT}", "OMP_NUM_THREADS": "1"})
    role = builder.train("benchmarks.recovery.goodput_job.train").nnodes(2).nproc_per_node(1)
    role.max_restart(MOST).per_node_max_failure(MOST)
    handle: JobHandle = (
        role.end()
        .build()
        .submit(
            "goodput",
            blocking=False,
            master=address,
            working_dir=str(ROOT),
            node_max_restart=MOST,
            job_max_restart=MOST,
        )
    )
    return handle


def kill_one(cluster: SupervisedCluster, rng: random.Random) -> Kill | None:
    """Kill a rank, an agent or the master; None if none of that kind is there now."""
    kind = rng.choice(KINDS)
    found: dict[int, str] = {}
    if kind == "rank":
        found = {pid: name for pid, name in cluster.workers().items() if name != "store"}
    else:
        for name in cluster.names if kind == "agent" else ["master"]:
            if (pid := cluster.pid(name)) is not None:
                found[pid] = name
    if not found:
        return None
    pid = rng.choice(sorted(found))
    at = time.time()
    cluster.kill(pid)
    return Kill(at, kind, f"{kind} {found[pid]}")


def account(steps: list[work.Step], kills: list[Kill]) -> dict[str, Any]:
    """The share of useful time: steps that training kept, each as long as one that nothing disturbs, of all time after
    the first kill; and where the rest went. An undisturbed step takes the median of those before the first kill, or of
    those after it where that is shorter, so that a machine that was busy at first makes no figure better.
    """
    first = kills[0].at
    mine = [step for step in steps if step.rank == 0]
    before = [step for step in mine if step.at < first][-1]
    after = [step for step in mine if step.at >= first]
    calm = gaps([step.at for step in mine if step.at < first])
    step_s = min(statistics.median(calm), statistics.median(gaps([step.at for step in after])))
    useful = after[-1].step - before.step
    repeated = len(after) - useful
    wall_s = after[-1].at - first
    costs = [cost(mine, kill, end) for kill, end in zip(kills, [*kills[1:], None], strict=True)]
    paused_s = sum(gap - step_s for gap in gaps([step.at for step in [before, *after]]) if gap >= PAUSE_STEPS * step_s)
    return {
        "goodput": useful * step_s / wall_s,
        "wall_s": wall_s,
        "step_s": step_s,
        "useful_steps": useful,
        "repeated_steps": repeated,
        "repeated_s": repeated * step_s,
        "paused_s": paused_s,
        "slower_s": wall_s - (useful + repeated) * step_s - paused_s,
        "kills": {kind: sum(kill.kind == kind for kill in kills) for kind in KINDS},
        "pause_s": {
            kind: round(statistics.median(each["pause_s"] for each in costs if each["kind"] == kind), 3)
            for kind in KINDS
            if any(each["kind"] == kind for each in costs)
        },
        "costs": costs,
    }


def cost(mine: list[work.Step], kill: Kill, following: Kill | None) -> dict[str, Any]:
    """What one kill cost: the longest time without a step until the next kill, and the steps done again."""
    until = following.at if following is not None else mine[-1].at
    there = [step for step in mine if kill.at <= step.at <= until]
    last = max((step.step for step in mine if step.at < kill.at), default=0)
    return {
        "at": round(kill.at - mine[0].at, 2),
        "kind": kill.kind,
        "what": kill.what,
        "pause_s": round(max(gaps([kill.at, *(step.at for step in there)]), default=until - kill.at), 3),
        "repeated_steps": sum(step.step <= last for step in there),
    }


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def show(result: dict[str, Any], picture: Path) -> None:
    table = Table("", "figure", title="Goodput")
    for name, value in {
        "time in useful steps": f"{result['goodput']:.1%}",
        "time in all": f"{result['wall_s']:.0f} s",
        "kills": ", ".join(f"{count} {kind}" for kind, count in result["kills"].items()),
        "longest pause after a kill, median": ", ".join(f"{kind} {s:.2f} s" for kind, s in result["pause_s"].items()),
        "undisturbed step, median": f"{1000 * result['step_s']:.1f} ms",
        "steps done, and done again": f"{result['useful_steps']}, {result['repeated_steps']}",
        "time lost": f"{result['repeated_s']:.1f} s in steps done again, {result['paused_s']:.1f} s in pauses, "
        f"{result['slower_s']:.1f} s in slower steps",
        "exit code of the job": str(result["exit_code"]),
    }.items():
        table.add_row(name, value)
    console = Console()
    console.print(table)
    console.print(f"picture: {picture}", highlight=False)


def plot(steps: list[work.Step], kills: list[Kill], result: dict[str, Any], file: Path) -> None:
    """Steps over time, with the kills."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    began = steps[0].at
    colours = {"rank": "tab:blue", "agent": "tab:red", "master": "tab:grey"}
    figure, (line, rate) = pyplot.subplots(2, 1, figsize=(10, 5), sharex=True, layout="constrained")
    mine = [step for step in steps if step.rank == 0]
    line.plot([step.at - began for step in mine], [step.step for step in mine], linewidth=1)
    line.set_ylabel("step")
    seconds = int(mine[-1].at - began) + 1
    rate.stairs(np.histogram([step.at - began for step in mine], bins=range(seconds + 1))[0], range(seconds + 1))
    rate.set(ylabel="steps a second", xlabel="seconds")
    for kill in kills:
        for axes in (line, rate):
            axes.axvline(kill.at - began, color=colours[kill.kind], linewidth=0.8, linestyle=":")
    for kind, colour in colours.items():
        rate.plot([], [], color=colour, linestyle=":", label=f"{kind} killed")
    rate.legend(loc="lower left", fontsize=8)
    figure.suptitle(f"goodput {result['goodput']:.1%}")
    figure.savefig(file)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
