"""A real worker process: how it is stopped."""

import signal
import time
from collections.abc import Callable

import pytest

from tests.support.deadlines import missed
from tests.support.workers import Agent, Child
from unified.protocol.worker_agent import Finished, Hello, Saving, Stop

pytestmark = pytest.mark.processes

SLEEPER = """
    import signal, sys, time
    from unified.api.runtime.worker import current_worker

    def deaf():
        print("up")
        time.sleep(600)

    def looks():
        while not current_worker().should_stop:
            print("up")
            time.sleep(0.01)
        print("stopped")

    def late_look():
        current_worker().should_stop
        print("up")
        while not current_worker().should_stop:
            time.sleep(0.01)
        print("stopped")

    def calls_back():
        import threading
        done = threading.Event()
        current_worker().on_stop(lambda: print("called"))
        current_worker().on_stop(done.set)
        print("up")
        done.wait()

    def own_handler():
        def handler(number, frame):
            print("mine")
            sys.exit(0)
        signal.signal(signal.SIGTERM, handler)
        print("up")
        time.sleep(600)
"""


@pytest.mark.parametrize(("name", "said"), [("looks", "stopped"), ("late_look", "stopped"), ("calls_back", "called")])
@pytest.mark.parametrize("way", ["order", "signal and order", "order and signal"])
def test_worker_that_asked_for_time_ends_by_itself(agent: Agent, name: str, said: str, way: str) -> None:
    child = agent.run(SLEEPER, name)
    child.until_printed("up")
    if way == "signal and order":
        child.process.send_signal(signal.SIGTERM)
        child.until_printed(said)
    child.say(Stop(grace_s=100, reason="test"))
    if way == "order and signal":
        child.process.send_signal(signal.SIGTERM)
    child.expect(Finished)
    assert child.exit_code() == 0
    assert said in child.output.read_text()


@pytest.mark.parametrize(("name", "said"), [("looks", "stopped"), ("calls_back", "called")])
def test_work_that_a_signal_alone_has_cut_is_not_finished(agent: Agent, name: str, said: str) -> None:
    """SLURM sends SIGTERM to each process of a step: what returns then may have done half of its work."""
    child = agent.run(SLEEPER, name, job={"stop_grace_s": missed(0.5)})
    child.until_printed("up")
    child.process.send_signal(signal.SIGTERM)
    assert child.exit_code() == 128 + signal.SIGTERM
    assert said in child.output.read_text()
    with pytest.raises(AssertionError, match="hung up"):
        child.expect(Finished)


@pytest.mark.parametrize(
    ("stop", "code"),
    [
        (lambda child: child.say(Stop(grace_s=600, reason="test")), 128 + signal.SIGTERM),
        (lambda child: child.process.send_signal(signal.SIGTERM), -signal.SIGTERM),
    ],
    ids=["order", "signal"],
)
def test_worker_that_does_not_listen_is_ended_at_once(agent: Agent, stop: Callable[[Child], None], code: int) -> None:
    child = agent.run(SLEEPER, "deaf")
    child.until_printed("up")
    stop(child)
    assert child.exit_code() == code
    assert list(agent.run_dir.rglob("*.sock")) == []


SAVER = """
    import threading, time
    from pathlib import Path
    from unified.api.runtime.worker import current_worker

    def save():
        with current_worker().saving():
            print("up")
            while not Path("go").exists():
                time.sleep(0.01)
            Path("saved").touch()

    def deaf():
        threading.Thread(target=save, daemon=True).start()
        time.sleep(600)

    def watches():
        current_worker().on_stop(lambda: None)
        save()

    def manages():
        import numpy
        from unified.checkpoint.save import CheckpointSaver
        from unified.checkpoint import CheckpointManager
        write = CheckpointSaver.write

        def slowly(self, request):
            print("up")
            while not Path("go").exists():
                time.sleep(0.01)
            write(self, request)
            Path("saved").touch()

        CheckpointSaver.write = slowly
        manager = CheckpointManager("checkpoints")
        manager.save({"x": numpy.zeros(3)}, 1)
        time.sleep(600)
"""


@pytest.mark.parametrize(("name", "code"), [("deaf", 143), ("manages", 143), ("watches", 0)])
def test_a_planned_stop_waits_for_a_checkpoint_that_is_being_written(agent: Agent, name: str, code: int) -> None:
    child = agent.run(SAVER, name)
    child.until_printed("up")
    assert child.expect(Saving) == Saving()
    child.say(Stop(grace_s=missed(0.5), save_grace_s=600, reason="test"))
    child.process.send_signal(signal.SIGTERM)
    time.sleep(missed(1.0))
    (agent.folder / "go").touch()
    child.expect(Saving)
    assert child.exit_code() == code
    assert (agent.folder / "saved").exists()


def test_a_restart_waits_for_no_checkpoint(agent: Agent) -> None:
    child = agent.run(SAVER, "deaf")
    child.until_printed("up")
    child.say(Stop(grace_s=missed(0.5), reason="test"))
    assert child.exit_code() == 143
    assert not (agent.folder / "saved").exists()


def test_own_handler_of_sigterm_is_respected(agent: Agent) -> None:
    child = agent.run(SLEEPER, "own_handler")
    child.until_printed("up")
    child.stop()
    child.expect(Finished)
    assert child.exit_code() == 0
    assert "mine" in child.output.read_text()


def test_stop_reaches_a_main_thread_that_is_stuck_in_c(agent: Agent) -> None:
    child = agent.run(
        """
        import ctypes, signal

        def run():
            print("up")
            # blocks signals for itself and sleeps without ever returning to the interpreter
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            ctypes.CDLL(None).sleep(600)
        """,
    )
    child.until_printed("up")
    assert child.ends() == 128 + signal.SIGTERM


def test_stop_before_the_order_to_run(agent: Agent) -> None:
    child = agent.load("def run(): pass")
    child.expect(Hello)
    assert child.ends() in (128 + signal.SIGTERM, -signal.SIGTERM)


def test_stop_before_the_order_to_run_with_a_callback(agent: Agent) -> None:
    child = agent.load(
        """
        from unified.api.runtime.worker import current_worker
        current_worker().on_stop(lambda: print("called"))
        print("up")
        def run(): pass
        """,
    )
    child.expect(Hello)
    child.until_printed("up")
    assert child.ends() == 0
    assert "called" in child.output.read_text()


def test_process_that_user_code_forks_is_not_the_worker(agent: Agent) -> None:
    """A data loader's process ends at SIGTERM as usual, and neither stops its worker nor speaks for it."""
    child = agent.run(
        """
        import os, signal, time
        from unified.api.runtime.worker import current_worker

        def run():
            current_worker().should_stop
            child = os.fork()
            if child == 0:
                current_worker().report(step=13)
                time.sleep(600)
            os.kill(child, signal.SIGTERM)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), current_worker().should_stop)
        """,
    )
    assert isinstance(child.next_word(), Finished)
    assert child.output.read_text() == "-15 False\n"


@pytest.mark.parametrize("name", ["deaf", "looks", "calls_back"])
def test_worker_ends_when_its_agent_is_gone(agent: Agent, name: str) -> None:
    child = agent.run(SLEEPER, name)
    child.until_printed("up")
    child.hang_up()
    assert child.exit_code() == 1
