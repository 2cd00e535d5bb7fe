"""Golden transcripts: commands above the line, everything decided and sent below it."""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.master import CRASH, ENTRY, LOOP, all_run
from tests.support.sim.chaos import play
from tests.support.sim.sim_agent import SimAgent
from tests.support.sim.world import World
from unified.job.spec import Communication, JobSpec, Resources, RoleSpec
from unified.protocol.agent_master import (
    AgentLeaving,
    AgentRefused,
    DesiredWorker,
    DesiredWorkers,
    MasterOrder,
    ObservedWorkers,
    RegisterAgent,
)
from unified.protocol.client_master import Accepted, Done, DrainNode, Refused, RestartWorkers, StopJob, SubmitJob
from unified.protocol.records import EventRecord, Failure, Stage
from unified_simulator.agent import SimulatedAgent, resources

LINE = "----"
SCENARIOS = Path(__file__).parents[2] / "sim" / "scenarios"


def split(path: Path) -> tuple[list[str], str]:
    """The commands and the expected text of a scenario file."""
    head, _, tail = path.read_text().partition(f"{LINE}\n")
    return head.splitlines(), tail


class Transcript:
    """Runs commands and writes down what happened."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._seed_now: float | None = None
        """Time in the world of a seed, which is another than ours."""
        self._known: dict[str, dict[str, str]] = {}
        self._states: dict[str, dict[str, str]] = {}
        self.world = World(watch=self._watch)
        self._commands: dict[str, Callable[[list[str], dict[str, str]], None]] = {
            "node": self._node,
            "submit": self._submit,
            "until": self._until,
            "run": lambda words, _: self.world.run(float(words[0])),
            "kill": self._kill,
            "fail": self._fail,
            "finish": self._finish,
            "claim": self._claim,
            "break": self._break,
            "stop": self._stop,
            "restart": self._restart,
            "lose": lambda words, _: self.world.kill_agent(words[0]),
            "leave": self._leave,
            "hang": lambda words, _: setattr(self.world.sim_agent(words[0]), "is_hung", True),
            "cut": lambda words, _: self.world.cut.add(words[0]),
            "heal": lambda words, _: self.world.cut.discard(words[0]),
            "stuck": self._stuck,
            "unkept": lambda words, _: setattr(self.world.keepers[words[0]], "is_over", True),
            "drain": self._drain,
            "master": self._master,
            "status": self._status,
            "seed": self._seed,
        }

    def play(self, commands: list[str]) -> str:
        for command in commands:
            words = shlex.split(command, comments=True)
            if words:
                plain = [word for word in words[1:] if "=" not in word]
                options = dict(word.split("=", 1) for word in words[1:] if "=" in word)
                self._commands[words[0]](plain, options)
        return "".join(f"{line}\n" for line in self.lines)

    # -- commands ----------------------------------------------------------------------------------------------------

    def _node(self, words: list[str], options: dict[str, str]) -> None:
        """``node n1 n2 devices=2 cpu=4 host=other incarnation=b core=real``."""
        offered = resources(cpu=float(options.get("cpu", "8")), devices=int(options.get("devices", "0")))
        for name in words:
            self._states.pop(name, None)
            incarnation = options.get("incarnation", "a")
            host = options.get("host", "")
            self.world.add(
                SimulatedAgent(name, offered, lambda: self.world.now, incarnation=incarnation, host_id=host)
                if options.get("core") == "real"
                else SimAgent(name, offered, incarnation=incarnation, host_id=host)
            )
        self.world.run(0.01)

    def _submit(self, words: list[str], options: dict[str, str]) -> None:
        """``submit NAME ROLE=TOTAL,elastic,device=1,max_restart=1 … failover_exec=2``."""
        known = {"node_num", "failover_exec", "failover_trigger", "node_max_restart", "job_max_restart", "stop_grace_s"}
        numbers = {key: int(value) for key, value in options.items() if key in known}
        numbers.setdefault("node_num", max(1, len(self.world.agents)))
        roles = [_role(name, value) for name, value in options.items() if name not in known and name != "wait"]
        spec = JobSpec(name=words[0], roles=roles, **numbers)  # type: ignore[arg-type]  # names checked above
        self.world.ask(SubmitJob(spec=spec, wait=options.get("wait") != "no"))

    def _until(self, words: list[str], options: dict[str, str]) -> None:
        """``until JOB STAGE`` or ``until JOB round=2 role=trainer``."""
        if "round" in options:
            number, role = int(options["round"]), options["role"]
            ranks = self.world.job(words[0]).ranks(role)
            self.world.until(lambda: all(one.round == number for one in ranks), f"round {number}")
        else:
            self.world.until_stage(words[0], Stage(words[1]))
            if words[1] == "RUNNING":  # which the job is before its workers have their orders
                self.world.until(lambda: all_run(self.world.job(words[0])), "all workers to run")

    def _kill(self, words: list[str], options: dict[str, str]) -> None:
        self._end(words[0], words[1], CRASH)

    def _fail(self, words: list[str], options: dict[str, str]) -> None:
        failure = Failure(
            summary=options.get("error", "ValueError: boom"),
            category=options.get("category", "user"),
            is_collateral="collateral" in words,
            traceback=options.get("traceback", ""),
        )
        self._end(words[0], words[1], failure)

    def _end(self, job: str, short: str, failure: Failure | None) -> None:
        job_id, name, node, agent = _worker(self.world, job, short)
        self.world.say(node, agent.end(job_id, name, failure))

    def _finish(self, words: list[str], options: dict[str, str]) -> None:
        for short in words[1:]:
            job_id, name, node, agent = _worker(self.world, words[0], short)
            self.world.say(node, agent.finish(job_id, name))

    def _claim(self, words: list[str], options: dict[str, str]) -> None:
        """``claim JOB WORKER NAME …``: these and no others."""
        job_id, name, node, agent = _worker(self.world, words[0], words[1])
        self.world.say(node, agent.claim(job_id, name, words[2:]))

    def _break(self, words: list[str], options: dict[str, str]) -> None:
        """``break JOB WORKER``: a collective of its elastic loop fails."""
        job_id, name, node, agent = _worker(self.world, words[0], words[1])
        self.world.say(node, agent.leave_round(job_id, name))

    def _stop(self, words: list[str], options: dict[str, str]) -> None:
        self.world.ask(StopJob(job=words[0], force="force" in words))

    def _restart(self, words: list[str], options: dict[str, str]) -> None:
        self.world.ask(RestartWorkers(job=words[0], workers=words[1:]))

    def _leave(self, words: list[str], options: dict[str, str]) -> None:
        self.world.say(words[0], self.world.agents[words[0]].leave())
        self.world.run(0.01)
        self.world.kill_agent(words[0])

    def _stuck(self, words: list[str], options: dict[str, str]) -> None:
        self.world.agents[words[0]].is_stuck = True

    def _drain(self, words: list[str], options: dict[str, str]) -> None:
        self.world.ask(DrainNode(node=words[0]))

    def _master(self, words: list[str], options: dict[str, str]) -> None:
        assert words == ["restart"]
        self._write("the master is killed and started again")
        self.world.restart_master()

    def _seed(self, words: list[str], options: dict[str, str]) -> None:
        """``seed 17``: random jobs under random faults."""
        play(int(words[0]), self._watch_seed)

    def _status(self, words: list[str], options: dict[str, str]) -> None:
        job = self.world.job(words[0])
        self._write(f"status {job.job_id} {job.stage} exit={job.exit_code}: {job.reason}")
        if job.end is not None:
            end = job.end
            self._write(f"status end: {end.worker}#{end.incarnation} on {end.node}, limit {end.limit!r}")
        for worker in job.workers.values():
            self._write(f"status {_short(worker.name)}#{worker.incarnation} {worker.state} {worker.node}")
        for name, holder in sorted(job.holders.items()):
            self._write(f"status name {name}: {_short(holder)}#{job.workers[holder].incarnation}")

    # -- writing -----------------------------------------------------------------------------------------------------

    def _write(self, text: str) -> None:
        now = self._seed_now if self._seed_now is not None else self.world.now if hasattr(self, "world") else 0.0
        self.lines.append(f"{now:7.3f} {text}")

    def _watch_seed(self, now: float, who: str, what: object) -> None:
        self._seed_now = now
        self._watch(now, who, what)

    def _watch(self, _now: float, who: str, what: object) -> None:
        match what:
            case str():
                self._write(f"{who}   {what}")
            case EventRecord():
                where = " ".join(word for word in (what.job, _short(what.worker) or what.role) if word)
                self._write(f"master  {what.event} {where or what.node}: {what.reason}")
            case DesiredWorkers():
                for line in self._differences(who[3:], what):
                    self._write(f"master  -> {who[3:]}  {line}")
            case ObservedWorkers():
                self._observed(who, what)
            case RegisterAgent() | AgentLeaving():
                self._write(f"{who}      {type(what).__name__}")
            case AgentRefused():
                self._write(f"master  -> {who[3:]}  refused: {what.reason}")
            case Accepted():
                self._write(f"master  -> client accepted {what.job_id}")
            case Done():
                self._write(f"master  -> client done: {what.note}")
            case Refused():
                self._write(f"master  -> client refused ({what.code}): {what.reason}")
            case MasterOrder() | _:
                pass

    def _differences(self, node: str, wanted: DesiredWorkers) -> list[str]:
        """What is new in a desired set, as orders."""
        before = self._known.get(node, {})
        after = {f"{_short(one.name)}#{one.worker_incarnation} of {one.job_id}": _orders(one) for one in wanted.workers}
        self._known[node] = after
        graces = {job.job_id: job.stop_grace_s for job in wanted.jobs}
        lines = []
        states = self._states.get(node, {})
        for incarnation in before.keys() - after.keys():
            if states.get(incarnation.split(" of ")[0], "").startswith("EXITED"):
                continue
            grace = graces.get(incarnation.split(" of ")[1], "-")
            lines.append(f"stop {incarnation}" + (f", grace {grace:g} s" if isinstance(grace, float) else ""))
        lines.sort()
        lines += [f"start {incarnation}" for incarnation in after if incarnation not in before]
        lines += [
            f"{what} {incarnation}" for incarnation, what in after.items() if what and before.get(incarnation) != what
        ]
        return lines

    def _observed(self, node: str, report: ObservedWorkers) -> None:
        before = self._states.get(node, {})
        after = {}
        for one in report.workers:
            failure = f" ({one.failure.summary})" if one.failure else ""
            after[f"{_short(one.name)}#{one.worker_incarnation}"] = f"{one.state}{failure}"
        self._states[node] = after
        for incarnation, state in after.items():
            if before.get(incarnation) != state and state != "STARTING":
                self._write(f"{node}      {incarnation} {state}")
        for incarnation in sorted(before.keys() - after.keys()):
            if not before[incarnation].startswith("EXITED"):
                self._write(f"{node}      {incarnation} is gone")


def _orders(one: DesiredWorker) -> str:
    run = f"run round {one.run.round} rank {one.run.rank} of {one.run.world_size}:" if one.run else ""
    return f"notice of round {one.notice.round} ({one.notice.kind}):" if one.notice else run


def _short(name: str) -> str:
    """trainer_2-1_1-0 → trainer-1."""
    if "_" not in name:
        return name
    role, world_rank, _ = name.rsplit("_", 2)
    return f"{role}-{world_rank.split('-')[1]}"


def _worker(world: World, job: str, short: str) -> tuple[str, str, str, SimAgent | SimulatedAgent]:
    record = world.job(job)
    found = next(worker for worker in record.workers.values() if _short(worker.name) == short)
    return record.job_id, found.name, found.node, world.agents[found.node]


def _role(name: str, text: str) -> RoleSpec:
    """``2,elastic,device=1,per_group=2,max_restart=1,not_driver,restart_alone``."""
    total, *words = text.split(",")
    numbers = {key: int(value) for key, value in (word.split("=") for word in words if "=" in word and key_of(word))}
    device = next((float(word.split("=")[1]) for word in words if word.startswith("device=")), 0.0)
    return RoleSpec(
        name=name,
        kind="elastic" if "elastic" in words or "rejoins" in words else "simple",
        entry_point=LOOP if "rejoins" in words else ENTRY,
        total=int(total),
        resources=Resources(accelerator=device),
        is_driver="not_driver" not in words,
        restart_alone="restart_alone" in words,
        communication=Communication(),
        **numbers,  # type: ignore[arg-type]  # names checked by key_of
    )


def key_of(word: str) -> bool:
    return word.split("=")[0] in ("per_group", "max_restart", "per_node_max_failure", "min_nodes", "max_nodes")


def main() -> None:
    """Print the transcript of a seed; given a name, too, keep it as the scenario of that name."""
    seed, names = sys.argv[1], sys.argv[2:]
    transcript = Transcript()
    try:
        transcript.play([f"seed {seed}"])
    finally:
        found = "".join(f"{line}\n" for line in transcript.lines)
        sys.stdout.write(found)
        for name in names:
            (SCENARIOS / f"{name}.txt").write_text(f"seed {seed}\n{LINE}\n{found}")


if __name__ == "__main__":
    main()
