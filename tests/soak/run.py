"""Hours in minutes: calls of every kind, queues, large payloads, and workers that are killed. See tests/soak/README.md.

Everything is accounted for: each call ends once, in a way that it may, within its deadline; each queue item is consumed
once; memory and descriptors do not grow; nothing is left behind. Exit code 1 if any of that is not so.
"""

import argparse
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.soak import health, journal
from tests.soak.accounts import Accounts, Kill, close, named, plot, show
from tests.soak.journal import Incarnation
from unified.api.builder import DLJob, DLJobBuilder
from unified.bus.shm.files import GRACE_S
from unified.client.embedded import CLUSTER_VARIABLE, EmbeddedCluster
from unified.client.handle import JobHandle
from unified.protocol.client_master import WorkerStatus
from unified.protocol.records import Stage, WorkerState

NODES = 2
PEERS = 8
MORTAL = ("peer", "vault")
ALWAYS = 1_000_000
"""A limit that is never reached."""
OPTIONS: dict[str, Any] = {"job_max_restart": ALWAYS, "node_max_restart": ALWAYS}
SAMPLE_S = 2.0
START_S = 60.0
DRAIN_S = 60.0
END_S = 30.0
POLL_S = 0.05
FEWEST_CALLS_A_SECOND = 20
FEWEST_ITEMS_A_SECOND = 5


class Soak:
    """One run.

    Args:
        seconds: of load; start, draining and end come on top.
        kill_every_s: 0 kills nobody.
        steady_after_s: from when memory must not grow.
        route: for `UNIFIED_BUS_ROUTE`.
    """

    def __init__(
        self, seconds: float, kill_every_s: float, steady_after_s: float, seed: int, route: str, folder: Path
    ) -> None:
        self.seconds = seconds
        self.kill_every_s = kill_every_s
        self.steady_after_s = steady_after_s
        self.folder = folder
        self.route = route
        self.rng = random.Random(seed)
        self.kills: list[Kill] = []
        self.samples: list[health.Sample] = []
        self.wrong: list[str] = []
        self.began_at = 0.0
        self.tail = journal.Tail(folder)

    def run(self) -> dict[str, Any]:
        cluster = EmbeddedCluster(NODES, 8, home=self.folder / "cluster")
        with (
            cluster,
            job(self.folder, self.route).submit("soak", blocking=False, master=cluster.address, **OPTIONS) as handle,
        ):
            self.until(lambda: num_running(handle) == PEERS + 3, START_S, "all workers run")
            self.load(cluster, handle)
            self.drain(handle)
            self.check_incarnations(handle)
            self.sign("stop")
            self.until(lambda: handle.status().stage is Stage.STOPPED, END_S, "the job ends")
            status = handle.status()
            if status.exit_code != 0:
                self.wrong.append(f"the job ended with {status.exit_code}: {status.reason}")
            self.until(lambda: not self.left_in_memory(), GRACE_S + 5, "shared memory is empty after the job")
            self.wrong += [f"in shared memory after the job: {left}" for left in self.left_in_memory()]
        self.wrong += [f"left behind: {thing}" for thing in cluster.left_behind]
        self.wrong += [f"in shared memory after the cluster: {left}" for left in self.left_in_memory()]
        return self.result()

    def load(self, cluster: EmbeddedCluster, handle: JobHandle) -> None:
        """The time that counts."""
        began = time.monotonic()
        self.began_at = time.time()
        kill_at = began + self.kill_every_s if self.kill_every_s else float("inf")
        sample_at = began
        while (now := time.monotonic()) < began + self.seconds:
            if now >= sample_at:
                sample_at += SAMPLE_S
                self.sample(cluster, handle, now - began)
            if now >= kill_at:
                kill_at += self.kill_every_s
                self.kill(handle)
            time.sleep(max(0.0, min(sample_at, kill_at, began + self.seconds) - time.monotonic()))

    def sample(self, cluster: EmbeddedCluster, handle: JobHandle, at: float) -> None:
        names = {cluster.master_pid: "master"}
        for number, agent in enumerate(cluster.agent_pids, 1):
            names[agent] = f"agent {number}"
            names |= {child.pid: f"zygote {number}" for child in psutil.Process(agent).children() if is_zygote(child)}
        status = handle.status()
        names |= {worker.pid: worker.role for worker in status.workers if worker.role in ("keeper", "elder")}
        if status.stage is Stage.STOPPED:
            raise SystemExit(f"the job ended during the soak: {status.reason}")
        found = health.look(at, f"{CLUSTER_VARIABLE}={cluster.cluster_id}", names, self.tail.inboxes)
        self.samples.append(found)
        print(
            f"{at:5.0f}/{self.seconds:.0f} s  {len(self.kills)} killed  {found.num_processes} processes  "
            f"{found.pss_mib:.0f} MiB, shared {found.shared_mib:.0f} MiB  {self.progress()}",
            file=sys.stderr,
            flush=True,
        )

    def progress(self) -> str:
        """Return a summary of the journals so far, updated by what is new in them."""
        totals = self.tail.read()
        wrong = f", {totals['wrong']} WRONG" if totals["wrong"] else ""
        return f"{totals['calls']} calls, {totals['put!']} puts, {totals['ack!']} acknowledged{wrong}"

    def kill(self, handle: JobHandle) -> None:
        """One mortal worker that runs now, with SIGKILL."""
        dead = {kill.incarnation for kill in self.kills}  # of which the master may not know yet
        victims = [
            worker
            for worker in handle.status().workers
            if worker.role in MORTAL and worker.state is WorkerState.RUNNING and incarnation_of(worker) not in dead
        ]
        if victims:
            victim = self.rng.choice(victims)
            at = time.time()
            try:
                os.kill(victim.pid, signal.SIGKILL)
            except ProcessLookupError:
                self.wrong.append(f"{named(incarnation_of(victim))} had died by itself")
            else:
                self.kills.append(Kill(at, incarnation_of(victim)))

    def drain(self, handle: JobHandle) -> None:
        """No more kills, puts and calls; everything that is under way comes to its end."""
        self.until(lambda: num_running(handle) == PEERS + 3, START_S, "all workers run again after the last kill")
        self.sign("calm")
        self.until((self.folder / "drained").exists, DRAIN_S, "both queues become empty")
        quiet = [f"quiet.peer-{rank}" for rank in range(PEERS)] + ["quiet.elder-0"]
        self.until(lambda: all((self.folder / name).exists() for name in quiet), DRAIN_S, "no call is open any more")

    def check_incarnations(self, handle: JobHandle) -> None:
        """Nobody died but those who were killed."""
        kills = Counter(kill.incarnation.worker for kill in self.kills)
        for worker in handle.status().workers:
            name = incarnation_of(worker).worker
            if worker.incarnation != kills[name]:
                self.wrong.append(
                    f"{name} was killed {kills[name]} times and is in incarnation {worker.incarnation}: {worker.reason}"
                )

    def until(self, is_true: Callable[[], object], within_s: float, what: str) -> None:
        deadline = time.monotonic() + within_s
        while not is_true():
            if time.monotonic() > deadline:
                queues = self.folder / "queues"
                said = f"; the queues: {queues.read_text()}" if queues.exists() else ""
                self.wrong.append(f"it did not come to this within {within_s:g} s: {what}{said}")
                return
            time.sleep(POLL_S)

    def left_in_memory(self) -> list[str]:
        self.tail.read()
        inboxes = self.tail.inboxes
        return [f"{path.name} of {inboxes[path.name.split('-')[1]]}" for path in health.shared_files(inboxes)]

    def sign(self, name: str) -> None:
        (self.folder / name).touch()

    def result(self) -> dict[str, Any]:
        accounts = close(journal.read(self.folder), self.kills, self.began_at)
        growths, growing = health.judge(self.samples, self.steady_after_s)
        wrong = [*self.wrong, *growing, *accounts.wrong, *self.idleness(accounts)]
        rate = accounts.num_calls / self.seconds
        by_second = sorted((second - self.began_at, count) for second, count in accounts.calls_by_second.items())
        return {
            "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load_1min": os.getloadavg()[0]},
            "seconds": self.seconds,
            "passed": not wrong,
            "wrong": wrong,
            "shown": [*self.wrong, *growing, *accounts.shown(), *self.idleness(accounts)],
            "calls": dict(accounts.calls),
            "calls_per_s": rate,
            "calls_by_second": by_second,
            "longest_lateness_s": accounts.longest_lateness_s,
            "items": dict(accounts.items),
            "kills_by_role": dict(Counter(kill.incarnation.worker.rpartition("-")[0] for kill in self.kills)),
            "kills": [(kill.at - self.began_at, *kill.incarnation) for kill in self.kills],
            "growth": growths,
            "pss_mib": self.samples[-1].pss_mib,
            "shared_mib": self.samples[-1].shared_mib,
            "samples": [sample._asdict() for sample in self.samples],
        }

    def idleness(self, accounts: Accounts) -> Iterator[str]:
        """A soak in which little happened proves nothing."""
        if accounts.num_calls < FEWEST_CALLS_A_SECOND * self.seconds:
            yield f"only {accounts.num_calls} calls were made"
        if accounts.items["put"] < FEWEST_ITEMS_A_SECOND * self.seconds:
            yield f"only {accounts.items['put']} items went through the queues"
        if self.kill_every_s and len(self.kills) < 0.6 * self.seconds / self.kill_every_s:
            yield f"only {len(self.kills)} workers could be killed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600, help="of load (default: 600)")
    parser.add_argument("--kill-every", type=float, default=5, metavar="S", help="0 kills nobody (default: 5)")
    parser.add_argument("--steady-after", type=float, metavar="S", help="default: 120, or half of the time if less")
    parser.add_argument("--seed", type=int, default=1, help="of who is killed (default: 1)")
    parser.add_argument("--route", default="auto", choices=["auto", "tcp", "relay"], help="of calls (default: auto)")
    parser.add_argument("--out", type=Path, default=Path("out/soak"), help="where soak.json and soak.svg go")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    steady_after_s = min(120.0, args.seconds / 2) if args.steady_after is None else args.steady_after
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = Soak(args.seconds, args.kill_every, steady_after_s, args.seed, args.route, Path(folder))
        result = soak.run()
        kept = args.out / "journals"
        shutil.rmtree(kept, ignore_errors=True)
        if not result["passed"]:  # for whoever has to find out
            shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("*.sqlite*"))
    (args.out / "soak.json").write_text(json.dumps(result, indent=1))
    kills = [at for at, *_ in result["kills"]]
    plot(soak.samples, result["calls_by_second"], kills, args.out / "soak.svg")
    show(result)
    return 0 if result["passed"] else 1


def job(folder: Path, route: str) -> DLJob:
    builder = DLJobBuilder().node_num(NODES).device_per_node(8).device_type("CPU").config({"folder": str(folder)})
    builder = builder.global_env({"UNIFIED_BUS_ROUTE": route})
    roles = {"keeper": ("Keeper", 1), "vault": ("Vault", 1), "elder": ("Elder", 1), "peer": ("Peer", PEERS)}
    for name, (cls, total) in roles.items():
        role = builder.role(name).run(f"tests.soak.job.{cls}").total(total).resource(cpu=0.01)
        role = role.restart_alone().max_restart(ALWAYS).per_node_max_failure(ALWAYS)
        builder = (role if name == "keeper" else role.not_driver()).end()
    return builder.build()


def num_running(handle: JobHandle) -> int:
    return sum(worker.state is WorkerState.RUNNING for worker in handle.status().workers)


def incarnation_of(worker: WorkerStatus) -> Incarnation:
    return Incarnation(f"{worker.role}-{worker.rank}", worker.incarnation)


def is_zygote(process: psutil.Process) -> bool:
    try:
        return any("zygote" in argument for argument in process.cmdline())
    except psutil.Error:  # it has just ended
        return False


if __name__ == "__main__":
    sys.exit(main())
