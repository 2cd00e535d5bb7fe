"""What the death of a rank costs: seconds until all ranks are past their next step, and steps lost, beside torchrun and
torchft; and that of a node. See benchmarks/README.md.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks import program
from benchmarks.bus.work import SETTLE_S
from benchmarks.launch.run import MissedDeadlineError, command_of, free_port
from benchmarks.recovery import report, work
from unified.client.embedded import EmbeddedCluster

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TORCHFT = ROOT / "out/peers/torchft/bin"
SETTLED_STEPS = work.SAVE_EVERY + 3
"""Steps of each rank before one is killed: there is a checkpoint, and some steps to lose."""
DEADLINE_S = 60.0
POLL_S = 0.01
RESTARTS = 3
VICTIM = 1
NODES = 4
"""Of which two train, and two are in reserve."""
KEEPER = "unified-lease"
"""Name of the process that tells the master when its agent has ended."""


class Contender(NamedTuple):
    name: str
    commands: Callable[[Path, int, int], list[list[str]]]
    """Commands that start so many ranks, which write into a folder, on so many nodes."""
    env: dict[str, str]


class Recovery(NamedTuple):
    seconds: float
    lost: float
    """Steps that were reached and had to be done again."""


def main() -> int:
    parser = program.parser(__doc__, [row.name for row in report.ROWS])
    parser.add_argument("--contenders", type=program.names_of(list(report.TITLES)), default=list(report.TITLES))
    parser.add_argument("--ranks", type=int, nargs="*", default=list(report.RANKS))
    args = parser.parse_args()

    def measure() -> tuple[program.Figures, list[str]]:
        figures: program.Figures = {name: {row.name: [] for row in report.ROWS} for name in args.contenders}
        problems: list[str] = []
        with EmbeddedCluster(nodes=1, devices_per_node=max(args.ranks, default=1)) as cluster, lighthouse() as address:
            contenders = [one for one in contenders_on(cluster.address, address) if one.name in args.contenders]
            for attempt in range(args.rounds):
                for num_ranks in args.ranks:
                    for contender in contenders:
                        measure_rank(contender, num_ranks, attempt, figures, problems)
        with_nodes = report.WITH_NODES if not args.rows or {report.TOLD, report.SILENT} & set(args.rows) else ()
        for attempt in range(args.rounds):
            for name in (name for name in with_nodes if name in args.contenders):
                measure_nodes(name, attempt, figures, problems)
        figures[report.ALLOWED] = {report.SILENT: [report.LEASE_S + 1.0]}
        return figures, problems

    return program.run("recovery", args, measure, report, report.judged)


def contenders_on(master: str, lighthouse: str) -> list[Contender]:
    bin_ = Path(sys.executable).parent

    def plain(launcher: Sequence[str]) -> Callable[[Path, int, int], list[list[str]]]:
        def commands(folder: Path, num_ranks: int, num_nodes: int) -> list[list[str]]:
            command = [*launcher, f"--nnodes={num_nodes}", f"--nproc-per-node={num_ranks // num_nodes}"]
            command.append(f"--max-restarts={RESTARTS}")
            return [[*command, f"--master-port={free_port()}", str(HERE / "plain_rank.py"), str(folder)]]

        return commands

    def torchft(folder: Path, num_ranks: int, _: int) -> list[list[str]]:
        launcher = [str(TORCHFT / "torchrun"), "--nnodes=1", "--nproc-per-node=1", f"--max-restarts={RESTARTS}"]
        script = str(HERE.parent / "peers/torchft_rank.py")
        return [
            [*launcher, f"--master-port={free_port()}", script, str(folder), str(rank)] for rank in range(num_ranks)
        ]

    def in_place(folder: Path, num_ranks: int, num_nodes: int) -> list[list[str]]:
        return [[sys.executable, str(HERE / "elastic_job.py"), str(folder), str(num_ranks), str(num_nodes)]]

    return [
        Contender("in_place", in_place, {"UNIFIED_MASTER": master}),
        Contender("process", plain([str(bin_ / "unified"), "run"]), {"UNIFIED_MASTER": master}),
        Contender("torchrun", plain([str(bin_ / "torchrun")]), {"BENCH_PREFIX": "1"}),
        *([Contender("torchft", torchft, {"TORCHFT_LIGHTHOUSE": lighthouse})] if lighthouse else []),
    ]


@contextlib.contextmanager
def lighthouse() -> Iterator[str]:
    """torchft's coordinator: its address; empty where torchft is not installed."""
    if not (TORCHFT / "torchft_lighthouse").exists():
        yield ""
        return
    port = free_port()
    command = [str(TORCHFT / "torchft_lighthouse"), "--min_replicas=1", f"--bind=127.0.0.1:{port}"]
    # torchft's own advice for quick tests: survivors wait for stragglers no longer than this.
    command += ["--join_timeout_ms=1000", "--heartbeat_timeout_ms=1000"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def measure_rank(
    contender: Contender, num_ranks: int, attempt: int, figures: program.Figures, problems: list[str]
) -> None:
    """Kill a rank."""
    what = f"{contender.name}, {num_ranks} ranks, round {attempt + 1}"
    found = measured(contender, num_ranks, 1, lambda victim: os.kill(victim, signal.SIGKILL), what, problems)
    if found is not None:
        figures[contender.name][f"seconds_{num_ranks}"].append(found.seconds)
        figures[contender.name][f"lost_{num_ranks}"].append(found.lost)


def measure_nodes(name: str, attempt: int, figures: program.Figures, problems: list[str]) -> None:
    """Take a node away from two ranks on a node each, with others in reserve: its agent, then of another node all."""
    env = {"UNIFIED_LEASE_S": str(report.LEASE_S)}
    with EmbeddedCluster(nodes=NODES, devices_per_node=1, env=env, max_agent_restarts=0) as cluster:
        contender = next(each for each in contenders_on(cluster.address, "") if each.name == name)
        time.sleep(SETTLE_S)  # two of the nodes are in reserve, and have run no job when they are needed
        for row, kill in ((report.TOLD, kill_agent), (report.SILENT, kill_node)):
            what = f"{name}, {row}, round {attempt + 1}"
            found = measured(contender, 2, 2, partial(kill, cluster.agent_pids), what, problems)
            if found is not None:
                figures[name][row].append(found.seconds)


def kill_agent(agents: Sequence[int], victim: int) -> None:
    """Kill the agent of a rank's node. Its lease keeper tells the master."""
    agent_of(victim, agents).kill()


def kill_node(agents: Sequence[int], victim: int) -> None:
    """Kill all processes of a rank's node, and first the one that would tell the master of it."""
    agent = agent_of(victim, agents)
    others = sorted(agent.children(recursive=True), key=lambda each: each.name() != KEEPER)
    for process in (others[0], agent, *others[1:]):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has died with its parent
            process.kill()


def agent_of(victim: int, agents: Sequence[int]) -> psutil.Process:
    return next(each for each in psutil.Process(victim).parents() if each.pid in agents)


def measured(
    contender: Contender,
    num_ranks: int,
    num_nodes: int,
    kill: Callable[[int], None],
    what: str,
    problems: list[str],
) -> Recovery | None:
    """Measure one recovery and say so; nothing if it did not come about in time."""
    with tempfile.TemporaryDirectory(prefix="unified-bench-") as name:
        try:
            found = recover(contender, Path(name), num_ranks, num_nodes, kill)
        except MissedDeadlineError as error:
            problems.append(f"{what}: {error}")
            print(problems[-1], file=sys.stderr, flush=True)
            return None
    print(f"{what}: {found.seconds:.3g} s, {found.lost:g} steps lost", file=sys.stderr, flush=True)
    return found


def recover(
    contender: Contender, folder: Path, num_ranks: int, num_nodes: int, kill: Callable[[int], None]
) -> Recovery:
    """Have a rank that trains killed, given its pid; what it cost."""
    with running(contender, folder, num_ranks, num_nodes) as processes:
        before = wait_for(folder, lambda steps: _settled(steps, num_ranks), f"{num_ranks} ranks to train")
        victim = next(step.pid for step in reversed(before) if step.rank == VICTIM)
        killed_at = time.time()
        kill(victim)
        steps = wait_for(folder, lambda steps: recovered(steps, killed_at, victim, num_ranks), "all ranks to go on")
        (folder / "stop").touch()
        end(processes)
    firsts = recovered(steps, killed_at, victim, num_ranks)
    reached = max(step.step for step in steps if step.at <= killed_at)
    again = min(step.step for step in firsts.values())
    return Recovery(max(step.at for step in firsts.values()) - killed_at, float(max(0, reached + 1 - again)))


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for the end of processes that were asked to."""
    for process in processes:
        try:
            process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise MissedDeadlineError("it did not end") from None


def _settled(steps: list[work.Step], num_ranks: int) -> bool:
    done = {step.rank for step in steps if step.step >= SETTLED_STEPS and step.world_size == num_ranks}
    return len(done) == num_ranks


def recovered(steps: list[work.Step], killed_at: float, victim: int, num_ranks: int) -> dict[int, work.Step]:
    """The first step that a whole world did after a kill, by rank; nothing while a rank has not done it."""
    is_back = {step.step for step in steps if step.at > killed_at and step.rank == VICTIM and step.pid != victim}
    for number in sorted(is_back):  # the first may be one in which the newcomer only heals
        # The last line of that step: a survivor may have ended it once, just after the kill, and gone back.
        firsts = {step.rank: step for step in steps if step.at > killed_at and step.step == number}
        if len(firsts) == num_ranks and all(step.world_size == num_ranks for step in firsts.values()):
            return firsts
    return {}


def wait_for(folder: Path, is_true: Callable[[list[work.Step]], object], what: str) -> list[work.Step]:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        steps = work.read(folder)
        if is_true(steps):
            return steps
        if time.monotonic() > deadline:
            raise MissedDeadlineError(f"waited {DEADLINE_S:g} s for {what}")
        time.sleep(POLL_S)


@contextlib.contextmanager
def running(
    contender: Contender, folder: Path, num_ranks: int, num_nodes: int
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The commands, each in a session of its own; whatever is left of them at the end is killed."""
    env = {name: value for name, value in os.environ.items() if name != "UNIFIED_MASTER"}
    env |= {**contender.env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        processes = [
            subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            for command in contender.commands(folder, num_ranks, num_nodes)
        ]
    try:
        yield processes
    except MissedDeadlineError:
        kept = Path(tempfile.gettempdir()) / f"unified-bench-{contender.name}.log"
        kept.write_bytes((folder / "log").read_bytes())
        print(f"its output: {kept}", file=sys.stderr)
        raise
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for pid in {step.pid for step in work.read(folder)}:
            if str(folder) in command_of(pid):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
