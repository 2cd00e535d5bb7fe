"""A real worker process: how its program ends."""

import signal

import pytest

from tests.io.worker.test_worker_incarnation import calling
from tests.support.deadlines import missed
from tests.support.workers import DEADLINE_S, Agent, Child, Forker, Talk, attribute
from unified.job.spec import EntryPoint
from unified.protocol.worker_agent import Failed, Finished, Running, Stop
from unified.testing import eventually

pytestmark = pytest.mark.processes

ENDING = """
    import atexit, concurrent.futures.thread, os, sys, threading, time
    from concurrent.futures import ThreadPoolExecutor

    def until(name):
        while not os.path.exists(name):
            time.sleep(0.01)

    def work(name):
        until("go")
        print(name + "\\n", end="", flush=True)  # one write: two threads print at once

    class Closing:
        def __init__(self, name):
            self.name = name
            self.file = open(name, "w")
            self.file.write("not flushed")

        def __del__(self):
            print("deleted", os.path.basename(self.name))

    def mark_end():
        while not concurrent.futures.thread._shutdown:  # until Python begins to end the program
            time.sleep(0.01)
        open("ending", "w").close()

    def begin():
        atexit.register(print, "exit function")
        threading.Thread(target=mark_end, daemon=True).start()
        threading.Thread(target=work, args=("thread",), name="uploader").start()
        pool = ThreadPoolExecutor(1)
        pool.submit(work, "executor")
        print("last line")
"""
PROGRAMS = {
    "script": "log = open('log.csv', 'w'); log.write('row'); kept = Closing('kept'); begin()",
    "run": (
        "kept = Closing('kept')\ndef run():\n    global log\n    log = open('log.csv', 'w'); log.write('row'); begin()"
    ),
    "Service": (
        "class Service:\n    def run(self):\n        self.log = open('log.csv', 'w'); self.log.write('row')\n"
        "        self.kept = Closing('kept'); begin()"
    ),
}


def write(agent: Agent, program: str, more: str = "") -> EntryPoint:
    name = "script.py" if program == "script" else "wp_code.py"
    path = agent.write(name, ENDING)
    path.write_text(f"{path.read_text()}\n{PROGRAMS[program]}\n{more}")
    return EntryPoint(kind="script", target=name) if program == "script" else attribute(program)


def test_a_signal_after_the_end_does_not_reach_a_handler_whose_globals_are_gone(agent: Agent) -> None:
    text = "import signal\ncame = []\nsignal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))\n"
    agent.write("script.py", text)
    child = agent.run(EntryPoint(kind="script", target="script.py"))
    child.expect(Finished)
    child.process.send_signal(signal.SIGUSR1)
    assert child.ends() == 0
    assert child.errors.read_text() == ""


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_end_of_the_program_is_part_of_the_run(agent: Agent, program: str) -> None:
    child = agent.run(write(agent, program))
    child.until_printed("last line")
    assert not child.has_said_anything()
    agent.write("go", "")
    child.expect(Finished)
    check_end(agent, child)
    assert child.ends() == 0
    assert child.errors.read_text() == ""


def check_end(agent: Agent, child: Talk) -> None:
    lines = child.output.read_text().splitlines()
    assert lines[0] == "last line"
    assert set(lines[1:3]) == {"thread", "executor"}
    assert lines[3:] == ["exit function", "deleted kept"], child.errors.read_text()
    assert (agent.folder / "log.csv").read_text() == "row"
    assert (agent.folder / "kept").read_text() == "not flushed"


def test_a_forked_worker_ends_as_any_program(agent: Agent, forker: Forker) -> None:
    child = forker.launch(write(agent, "script"))
    child.run()
    child.until_printed("last line")
    agent.write("go", "")
    child.expect(Finished)
    check_end(agent, child)


def test_a_program_that_is_called_ends_when_it_is_let_go(agent: Agent) -> None:
    """What was under way is waited for; what its handlers need stays."""
    more = (
        "from unified import rpc\nlater = ThreadPoolExecutor(1)\n@rpc\ndef ask(): return later.submit(str, 7).result()"
    )
    child = agent.launch(write(agent, "script", more))
    with calling(agent, child.run()) as call:
        child.until_printed("last line")
        assert not child.has_said_anything()
        agent.write("go", "")
        child.expect(Finished)
        assert "exit function" not in child.output.read_text()
        assert call("ask").result(DEADLINE_S) == "7"
    assert child.ends() == 0
    check_end(agent, child)


def test_a_failed_program_loses_nothing_that_it_wrote(agent: Agent) -> None:
    agent.write("go", "")
    child = agent.run(write(agent, "script", "def fail():\n    mine = Closing('mine')\n    raise ValueError\nfail()"))
    assert child.failure().summary == "ValueError"
    assert child.exit_code() == 1
    said = set(child.output.read_text().splitlines())
    assert {"exit function", "deleted kept", "deleted mine"} < said, child.errors.read_text()
    assert (agent.folder / "log.csv").read_text() == "row"
    assert (agent.folder / "mine").read_text() == "not flushed"


def until_ending(agent: Agent) -> None:
    """Until the program itself is over: a stop that comes with its last line would still end it."""
    eventually((agent.folder / "ending").exists, timeout=100)


def test_a_stop_gives_the_end_its_time(agent: Agent) -> None:
    child = agent.run(write(agent, "script"))
    until_ending(agent)
    child.stop()
    assert child.expect(Running).is_ending
    agent.write("go", "")
    child.expect(Finished)
    assert child.exit_code() == 0
    check_end(agent, child)


@pytest.mark.parametrize("when", ["while it ends", "when it is let go"])
def test_an_end_that_a_stop_cuts_short_is_a_failure(agent: Agent, when: str) -> None:
    more = "" if when == "while it ends" else "from unified import rpc\n@rpc\ndef ask():\n    begin()"
    child = agent.launch(write(agent, "script", more))
    hello = child.run()
    if when == "while it ends":
        until_ending(agent)
        child.stop(grace_s=missed(0.5))
        assert child.expect(Running).is_ending
    else:
        agent.write("go", "")
        child.expect(Finished)
        (agent.folder / "go").unlink()
        with calling(agent, hello) as call:
            call("ask").result(DEADLINE_S)
        child.stop(grace_s=missed(0.5))
    failure = child.expect(Failed).failure
    assert failure.is_cut
    assert "its end was cut short after" in failure.summary
    assert ("uploader" if when == "while it ends" else "ThreadPoolExecutor") in failure.summary
    assert child.exit_code() == 1
    assert failure.summary in child.errors.read_text()


INTERRUPTED = """
    import atexit, signal, time

    def run():
        atexit.register(print, "exit function")
        try:
            print("up")
            time.sleep(600)
        except KeyboardInterrupt:
            print("interrupted")
            raise
        finally:
            print("finally")

    def catches():
        try:
            run()
        except KeyboardInterrupt:
            pass

    async def coroutine():
        import asyncio
        try:
            print("up")
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            print("cancelled")
            raise

    def chains():
        before = signal.getsignal(signal.SIGTERM)
        ended = []
        def handler(number, frame):
            if callable(before):
                before(number, frame)
            ended.append(number)
        signal.signal(signal.SIGTERM, handler)
        print("up")
        while not ended:
            time.sleep(0.01)
        print("ended by itself")
"""


@pytest.mark.parametrize(
    ("name", "said", "code"),
    [
        ("run", "up\ninterrupted\nfinally\nexit function\n", 130),
        ("catches", "up\ninterrupted\nfinally\nexit function\n", 0),
        ("coroutine", "up\ncancelled\n", 130),
    ],
)
def test_ctrl_c_is_a_keyboard_interrupt(agent: Agent, name: str, said: str, code: int) -> None:
    child = agent.run(INTERRUPTED, name)
    child.until_printed("up")
    interrupt(child)
    child.expect(Finished if code == 0 else Failed)
    assert child.exit_code() == code
    assert child.output.read_text() == said


def interrupt(child: Child) -> None:
    child.say(Stop(grace_s=100, reason="Ctrl-C", interrupt=True))
    child.process.send_signal(signal.SIGINT)


def test_ctrl_c_while_nobodys_code_runs_is_a_stop(agent: Agent) -> None:
    child = agent.run("def run(): pass")
    child.expect(Finished)
    interrupt(child)
    assert child.exit_code() == 0
    assert child.errors.read_text() == ""


def test_a_handler_of_sigterm_may_call_the_one_before_it(agent: Agent) -> None:
    child = agent.run(INTERRUPTED, "chains")
    child.until_printed("up")
    child.stop()
    child.expect(Finished)
    assert child.exit_code() == 0
    assert child.output.read_text() == "up\nended by itself\n"
