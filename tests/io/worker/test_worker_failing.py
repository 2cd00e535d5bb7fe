"""A real worker process: how it says that it failed."""

import signal

import pytest

from tests.support.workers import Agent
from unified.job.spec import EntryPoint
from unified.protocol.worker_agent import Finished, Hello, Reported

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("code", "name", "summary"),
    [
        ("def run(:\n    pass", "run", "wp_code.py:1: SyntaxError"),
        ("def main(): pass", "mian", "'wp_code' has no attribute 'mian'. Did you mean 'main'?"),
        ("class Service: pass", "Service", "has no run() method and no @rpc methods"),
        ("run = 3", "run", "must be a function or a class"),
        ("import nowhere_to_be_found", "run", "imports 'nowhere_to_be_found'"),
    ],
)
def test_setup_failure_is_said_before_the_order_to_run(agent: Agent, code: str, name: str, summary: str) -> None:
    child = agent.load(code, name)
    child.expect(Hello)
    failure = child.failure()
    assert failure.category == "setup"
    assert summary in failure.summary
    assert child.exit_code() == 1
    assert child.errors.read_text().count("\n") < 15


def test_a_working_directory_that_is_not_there_is_a_setup_failure(agent: Agent) -> None:
    child = agent.load("def run(): pass", envs={"DLROVER_WORKING_DIR": "/no/such/folder"})
    failure = child.failure()
    assert failure.category == "setup"
    assert "has no working directory /no/such/folder" in failure.summary
    assert child.exit_code() == 1


def test_two_rpc_methods_of_one_name_are_a_setup_failure(agent: Agent) -> None:
    child = agent.run(
        """
        from unified.bus.calls.registry import rpc

        @rpc("same")
        def one(): pass

        @rpc("same")
        def two(): pass

        def run(): pass
        """,
    )
    failure = child.failure()
    assert failure.category == "setup"
    assert "RPC method 'same' already registered." in failure.summary


@pytest.mark.smoke
def test_exception_becomes_a_failure_with_the_users_frames_only(agent: Agent) -> None:
    child = agent.run(
        """
        from unified.api.runtime.worker import current_worker

        def run():
            current_worker().report(step=7)
            train()

        def train():
            raise ValueError("loss is NaN")
        """,
    )
    assert child.expect(Reported).progress.step == 7
    failure = child.failure()
    assert (failure.summary, failure.category) == ("ValueError: loss is NaN", "user")
    assert child.exit_code() == 1
    assert child.errors.read_text().strip() == failure.traceback.strip()
    assert failure.traceback.startswith("Traceback (most recent call last):\n")
    assert 'wp_code.py", line 6, in run' in failure.traceback
    assert "unified/worker" not in failure.traceback


@pytest.mark.parametrize(
    ("argument", "summary", "code"),
    [("3", "exited with code 3", 3), ("'no data'", "exited with code 1: no data", 1)],
)
def test_exit_with_a_code_is_a_failure(agent: Agent, argument: str, summary: str, code: int) -> None:
    agent.write("script.py", f"import sys\nsys.exit({argument})")
    child = agent.run(EntryPoint(kind="script", target="script.py"))
    failure = child.failure()
    assert (failure.summary, failure.category, failure.exit_code) == (summary, "user", code)
    assert child.exit_code() == code


@pytest.mark.parametrize("argument", ["", "0", "None"])
def test_exit_without_a_code_is_success(agent: Agent, argument: str) -> None:
    agent.write("script.py", f"import sys\nsys.exit({argument})")
    child = agent.run(EntryPoint(kind="script", target="script.py"))
    child.expect(Finished)


def test_threads_of_a_failed_worker_do_not_keep_it(agent: Agent) -> None:
    child = agent.run(
        """
        import threading
        import unified.worker.exit

        unified.worker.exit.WITHIN_S = 0.2

        def run():
            threading.Thread(target=threading.Event().wait, name="forgotten").start()
            raise ValueError
        """,
    )
    child.failure()
    assert child.exit_code() == 1
    said = child.errors.read_text()
    assert "its end was cut short after 0." in said
    assert "it was waiting for threads forgotten" in said


FORKS = """
    import os, sys, time

    def run():
        pid = os.fork()
        if pid == 0:
            from unified.api.runtime.worker import current_worker
            current_worker().report(step=99)
            print("child")
            {way}
            return
        time.sleep(0.3)  # time for the child to say what it must not say
        print("parent", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize(
    ("way", "code"), [("sys.exit(0)", 0), ("sys.exit(3)", 3), ("pass", 0), ("raise ValueError('mine')", 1)]
)
def test_a_child_that_user_code_forks_does_not_speak_for_the_worker(agent: Agent, way: str, code: int) -> None:
    child = agent.run(FORKS.format(way=way))
    assert isinstance(child.next_word(), Finished)
    assert child.output.read_text() == f"child\nparent {code}\n"
    assert ("ValueError: mine" in child.errors.read_text()) == (code == 1)
    assert child.ends() == 0


def test_a_failure_that_a_peer_caused_prints_one_line(agent: Agent) -> None:
    child = agent.run(
        """
        from unified.errors import WorkerDiedError

        def run():
            raise WorkerDiedError("actor-1 died")
        """,
    )
    failure = child.failure()
    assert failure.is_collateral
    assert "in run" in failure.traceback
    assert child.exit_code() == 1
    printed = child.errors.read_text().splitlines()
    assert len(printed) == 1
    assert failure.summary in printed[0]


def test_a_segmentation_fault_prints_the_stack_of_its_thread_only(agent: Agent) -> None:
    child = agent.run("import faulthandler\ndef run(): faulthandler._sigsegv()")
    assert child.exit_code() == -signal.SIGSEGV
    printed = child.errors.read_text()
    assert "Segmentation fault" in printed
    assert 'wp_code.py", line 2 in run' in printed
    assert printed.count("most recent call first") == 1


SERVICE = """
import threading
from unified.api.runtime.worker import current_worker
from unified import rpc

class Service:
    def __init__(self):
        worker = current_worker()
        worker.{when}(lambda: threading.Thread(target=worker.fail, args=[ValueError("the child ended")]).start())
        worker.fail(KeyError("first")) if {is_first} else None

    @rpc()
    def ask(self): pass
"""


def test_a_service_can_be_ended_with_an_error_by_any_of_its_threads(agent: Agent) -> None:
    child = agent.run(SERVICE.format(when="on_finish", is_first=False), "Service", is_service=True)
    assert child.expect(Finished).is_serving
    assert child.failure().summary == "ValueError: the child ended"
    assert child.exit_code() == 1
    assert child.errors.read_text() == "ValueError: the child ended\n"


def test_the_first_of_such_errors_counts_once_the_entry_point_has_returned(agent: Agent) -> None:
    child = agent.run(SERVICE.format(when="on_finish", is_first=True), "Service", is_service=True)
    assert child.failure().summary == "KeyError: 'first'"


def test_an_error_of_a_thread_is_that_of_an_entry_point_which_returns(agent: Agent) -> None:
    child = agent.run(
        """
        from unified.api.runtime.worker import current_worker

        def run():
            current_worker().fail(ValueError("the child ended"))
        """,
    )
    assert child.failure().summary == "ValueError: the child ended"
    assert child.exit_code() == 1


def test_no_error_ends_a_worker_that_is_stopped(agent: Agent) -> None:
    child = agent.run(SERVICE.format(when="on_stop", is_first=False), "Service", is_service=True)
    child.expect(Finished)
    child.stop()
    assert child.exit_code() == 0
    assert "the child ended" not in child.errors.read_text()
