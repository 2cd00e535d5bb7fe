"""A real worker process: what it runs, what it says."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.workers import DEADLINE_S, HOST_ID, Agent, Forker, attribute
from unified.bus.calls.future import RpcFuture
from unified.bus.endpoint import BusEndpoint
from unified.bus.identity import BusIdentity, BusNetwork
from unified.errors import RpcNotFoundError
from unified.job.payload import encode
from unified.job.spec import EntryPoint
from unified.protocol.agent_master import RunOrder
from unified.protocol.records import DirectoryEntry, Progress, Reachability, WorkerReport
from unified.protocol.worker_agent import DirectoryNews, Finished, Hello, Reported, Run, Running

pytestmark = pytest.mark.processes


@pytest.mark.smoke
def test_function_lives_from_hello_to_exit(agent: Agent) -> None:
    child = agent.load(
        """
        import atexit, os, sys
        from unified.api.runtime.worker import current_worker

        def run(config):
            me = current_worker()
            atexit.register(print, "bye")
            print(me.actor_info.name, me.round, config, os.getcwd(), sys.path[0], os.environ["RANK"], sys.argv)
        """,
        job={"user_config": encode({"lr": 1})},
    )
    hello = child.run(RunOrder(round=3, rank=0, world_size=1))
    assert hello.pid == child.process.pid
    assert hello.inbox is not None
    assert hello.inbox.routes
    child.expect(Finished)
    assert child.process.poll() is None, "it stays for calls"
    assert child.ends() == 0
    folder = agent.folder
    assert child.output.read_text() == f"role_1-0_1-0 3 {{'lr': 1}} {folder} {folder} 0 ['wp_code']\nbye\n"
    assert child.errors.read_text() == ""
    assert list(agent.run_dir.rglob("*.sock")) == []


def test_a_worker_gives_way_to_daemons(agent: Agent) -> None:
    child = agent.run("import os\ndef run():\n    print(os.nice(0))\n", "run")
    child.expect(Finished)
    assert int(child.output.read_text()) == min(19, os.nice(0) + 1)


def test_class_is_made_and_run(agent: Agent) -> None:
    child = agent.run(
        """
        class Service:
            def __init__(self):
                self.state = "made"

            def run(self):
                print(self.state)
        """,
        "Service",
    )
    child.expect(Finished)
    assert child.output.read_text() == "made\n"


def test_script_runs_as_main_with_its_arguments(agent: Agent) -> None:
    path = agent.write(
        "script.py",
        """
        import sys
        if __name__ == "__main__":
            print(sys.argv[1:])
            sys.exit()
        """,
    )
    child = agent.run(EntryPoint(kind="script", target=path.name, argv=["--epochs", "2"]))
    child.expect(Finished)
    assert child.output.read_text() == "['--epochs', '2']\n"


def test_module_runs_as_with_dash_m(agent: Agent) -> None:
    agent.write("wp_module.py", "import sys; print(__name__, __spec__.name, sys.argv[1:])")
    child = agent.run(EntryPoint(kind="module", target="wp_module", argv=["-v"]))
    child.expect(Finished)
    assert child.output.read_text() == "__main__ wp_module ['-v']\n"


def test_import_does_not_wait_for_the_order_to_run(agent: Agent) -> None:
    child = agent.load("print('imported')\ndef run(): print('ran')")
    child.expect(Hello)
    child.until_printed("imported")
    assert "ran" not in child.output.read_text()


def test_a_worker_logs_as_its_environment_says(forker: Forker, agent: Agent) -> None:
    """It is forked from a process whose environment says nothing of it."""
    agent.write("wp_code.py", "import logging\ndef run(): logging.getLogger('unified.bus').info('event=said')")
    child = forker.launch(attribute("run"), envs={"RUST_LOG": "info"})
    child.run()
    child.expect(Finished)
    assert child.errors.read_text().endswith(" unified.bus INFO event=said\n")


def test_directory_news_reach_the_worker(agent: Agent) -> None:
    child = agent.run(
        """
        from unified.api.runtime.worker import current_worker

        def run():
            while current_worker().workers_of("role")[1].node != "n9":
                pass
        """,
        total=2,
    )
    entry = DirectoryEntry(worker="role_2-1_1-0", incarnation=0, state=Reachability.DEAD, node="n9")
    child.say(DirectoryNews(entries=[entry]))
    child.expect(Finished)


def test_calls_wait_until_the_entry_point_is_ready(agent: Agent) -> None:
    child = agent.load(
        """
        from unified.bus.calls.registry import rpc

        @rpc
        def double(number):
            return 2 * number

        class Service:
            @rpc("whoami")
            def name(self):
                return self.__class__.__name__
        """,
        "Service",
        is_driver=False,
    )
    with calling(agent, child.expect(Hello)) as call:
        early = call("double", 21)
        child.say(Run(order=RunOrder(round=1, rank=0, world_size=1)))
        assert early.result(DEADLINE_S) == 42
        child.expect(Running)
        child.expect(Finished)
        assert call("whoami").result(DEADLINE_S) == "Service"
        assert child.ends() == 0


SCRIPT = """
    import functools, os, sys, time
    import unified.bus.calls.late_exports
    from unified import rpc

    def until(name):
        while not os.path.exists(name):
            time.sleep(0.01)

    def wrapped(function):
        @functools.wraps(function)
        def inner(*args):
            return ["wrapped", function(*args)]
        return inner

    until("define")

    @wrapped
    @rpc
    def double(number):
        return 2 * number

    until("end")

    @rpc
    def late():
        return "late"

    sys.exit()
"""


def test_a_script_answers_calls_of_what_it_has_defined_while_it_runs(agent: Agent) -> None:
    agent.write("script.py", SCRIPT)
    child = agent.launch(EntryPoint(kind="script", target="script.py"))
    with calling(agent, child.run()) as call:
        early, late = call("double", 21), call("late")
        unknown = call("dubble", 21)
        assert not early.done()
        agent.write("define", "")
        assert early.result(DEADLINE_S) == ["wrapped", 42], "as the script's own code would call it"
        assert call("double", 4).result(DEADLINE_S) == ["wrapped", 8]
        assert not late.done()
        assert not unknown.done()
        agent.write("end", "")
        child.expect(Finished)
        assert late.result(DEADLINE_S) == "late"
        with pytest.raises(RpcNotFoundError, match=r"Did you mean 'double'.*Registered there: double, late"):
            unknown.result(DEADLINE_S)
        assert call("late").result(DEADLINE_S) == "late"
        assert child.ends() == 0


@contextmanager
def calling(agent: Agent, hello: Hello) -> Iterator[Callable[..., RpcFuture[Any]]]:
    entry = DirectoryEntry(worker="role_1-0_1-0", incarnation=0, state=Reachability.ALIVE, inbox=hello.inbox)
    caller = BusEndpoint(
        BusIdentity(job="job-1", worker="caller_1-0_1-0", incarnation=0, node="n1", host=HOST_ID),
        BusNetwork(run_dir=str(agent.run_dir), address="127.0.0.1"),
    )
    caller.start()
    try:
        caller.update_directory([entry])
        yield lambda method, *args: caller.call(entry.worker, method, args, {})
    finally:
        caller.close()


def test_forked_workers_are_independent(agent: Agent, forker: Forker) -> None:
    """What they inherit of the zygote's libraries is put right: random numbers, threads, exit functions."""
    agent.write(
        "wp_code.py",
        """
        import ctypes, os, pathlib, random, sys, tempfile
        import numpy, torch

        bundled = pathlib.Path(numpy.__file__).parent.parent.glob("numpy.libs/*openblas*")
        blas = [ctypes.CDLL(str(path)).scipy_openblas_get_num_threads64_() for path in bundled]

        kept = tempfile.TemporaryDirectory()

        def run():
            print(torch.get_num_threads(), *blas or [torch.get_num_threads()], os.path.isdir(kept.name), kept.name)
            print(numpy.random.rand(), random.random(), sys.argv)
        """,
    )
    lines = []
    for child in [forker.launch(attribute("run"), rank=rank, total=2) for rank in range(2)]:
        child.run()
        child.expect(Finished)
        first, second = child.output.read_text().splitlines()
        cores = len(os.sched_getaffinity(0))
        assert first.startswith(f"{cores} {cores} True ")
        lines.append(second)
        child.ends()
        assert not Path(first.split()[-1]).exists(), "its exit functions ran"
        assert child.errors.read_text() == ""
    assert lines[0] != lines[1]
    assert [line.partition(" [")[2] for line in lines] == ["'wp_code']"] * 2


DRAWS = """
    import json, multiprocessing.synchronize, os, random, secrets, ssl, tempfile, uuid
    import numpy, sympy.core.random, torch
    from sympy.core.symbol import Dummy

    def run():
        loader = torch.utils.data.DataLoader(range(10_000), batch_size=10_000, shuffle=True)
        draws = {
            "torch": torch.rand(1, dtype=torch.float64).item(),
            "torch init": torch.nn.Linear(64, 1).weight.sum().item(),
            "torch loader": next(iter(loader))[:20].tolist(),
            "numpy": numpy.random.rand(),
            "numpy generator": numpy.random.default_rng().random(),
            "random": random.random(),
            "sympy": sympy.core.random.random(),
            "sympy dummy": Dummy._prng.random(),
            "uuid1": str(uuid.uuid1()),
            "uuid4": str(uuid.uuid4()),
            "secrets": secrets.token_hex(),
            "ssl": ssl.RAND_bytes(16).hex(),
            "tempfile": os.path.basename(tempfile.mktemp()),
            "authkey": multiprocessing.current_process().authkey.hex(),
            "multiprocessing": next(multiprocessing.synchronize.SemLock._rand),
        }
        print(json.dumps([tempfile.gettempdir(), draws]))
"""


@pytest.mark.slow
def test_every_fork_draws_random_numbers_of_its_own(agent: Agent, forker: Forker) -> None:
    """Two ranks, two incarnations of one rank, two jobs."""
    agent.write("wp_code.py", DRAWS)
    envs = {"TMPDIR": str(agent.folder)}
    drawn: list[dict[str, object]] = []
    for rank, incarnation, job in [(0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b")]:
        child = forker.launch(
            attribute("run"), rank=rank, incarnation=incarnation, total=2, job={"name": job}, envs=envs
        )
        child.run()
        child.expect(Finished)
        folder, draws = json.loads(child.output.read_text())
        assert folder == str(agent.folder), "temporary files lie where the job says, not where the zygote's do"
        drawn.append(draws)
        child.ends()
    same = [name for name in drawn[0] if len({str(draws[name]) for draws in drawn}) < len(drawn)]
    assert same == []


def test_last_progress_comes_before_finished(agent: Agent) -> None:
    child = agent.run(
        """
        from unified.api.runtime.worker import current_worker

        def run():
            for step in range(5000):
                current_worker().report(step=step, total=5000, loss=5000 - step)
        """,
    )
    reports: list[Progress] = []
    points: list[WorkerReport] = []
    while isinstance(word := child.next_word(), Reported):
        reports.append(word.progress)
        points += word.points
    assert isinstance(word, Finished)
    assert reports[-1] == Progress(step=4999, total=5000, metrics={"loss": 1})
    assert len(reports) < 100
    assert (points[0].step, points[-1].step) == (0, 4999)
    assert all(point.metrics == {"loss": 5000 - (point.step or 0)} for point in points)
    assert [point.number for point in points] == [point.step for point in points]
