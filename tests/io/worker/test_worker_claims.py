"""A real worker process claims names: what it tells its agent, and what it makes of the answer."""

from tests.support.workers import Agent
from unified.protocol.records import DirectoryEntry, Inbox, NameClaims, NameRefusal, Reachability
from unified.protocol.worker_agent import Claimed, DirectoryNews, Finished

CODE = """
import os
from unified.api.runtime.worker import current_worker
from unified.errors import UsageError

def attempt(act, name):
    try:
        return act(name)
    except UsageError as error:
        return error

def run():
    names = current_worker().names
    print("at birth", names.holder("old"))
    names.claim("x")
    print("holds", names.holder("x"))
    print(attempt(names.claim, "y"))
    pid = os.fork()
    if pid == 0:
        print(attempt(names.claim, "z"))
        os._exit(0)
    os.waitpid(pid, 0)
    names.release("x")
"""


def test_claims_go_to_the_agent_and_answers_come_with_the_directory(agent: Agent) -> None:
    child = agent.load(CODE)
    inbox = child.run().inbox

    def answer(revision: int, names: dict[str, int], refused: dict[str, NameRefusal]) -> None:
        entry = DirectoryEntry(
            worker="role_1-0_1-0",
            incarnation=0,
            state=Reachability.ALIVE,
            inbox=inbox,
            names=names,
            refused=refused,
            revision=revision,
        )
        child.say(DirectoryNews(entries=[entry]))

    assert child.expect(Claimed).claims == NameClaims(number=1, names={"x": 1})
    answer(1, {"x": 1}, {})
    assert child.expect(Claimed).claims == NameClaims(number=2, names={"x": 1, "y": 2})
    answer(2, {"x": 1}, {"y": NameRefusal(number=2, holder="other_1-0_1-0")})
    assert child.expect(Claimed).claims == NameClaims(number=3, names={"x": 1})
    assert child.expect(Claimed).claims == NameClaims(number=4)
    child.expect(Finished)
    birth, holds, refused, forked = child.output.read_text().splitlines()
    assert birth == "at birth None"
    assert holds == "holds WorkerIncarnation(worker='role_1-0_1-0', number=0)"
    assert refused.endswith("cannot claim the name 'y' in job job-1: it is held by worker other_1-0_1-0.")
    assert "was forked from it" in forked


def test_a_worker_begins_with_the_holders_that_there_are(agent: Agent) -> None:
    holder = DirectoryEntry(
        worker="other_1-0_1-0",
        incarnation=3,
        state=Reachability.ALIVE,
        inbox=Inbox(inbox_id="i"),
        names={"old": 1},
        revision=1,
    )
    child = agent.run(
        """
        from unified.api.runtime.worker import current_worker

        def run():
            print(current_worker().names.find("old", 0.0))
        """,
        directory=[holder],
    )
    child.expect(Finished)
    assert child.output.read_text() == "other_1-0_1-0\n"
