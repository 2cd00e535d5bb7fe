"""A real worker process asks its agent for ports: what it sends, and what it makes of the answers."""

import msgspec

from tests.support.workers import Agent, Child
from unified.job.spec import EntryPoint
from unified.protocol.records import DirectoryEntry, Reachability
from unified.protocol.worker_agent import DirectoryNews, Finished, PortsHeld, PortsWanted

CODE = """
import os, threading
from unified.api.runtime.worker import current_worker
from unified.errors import UsageError

def attempt(num):
    try:
        return current_worker().ports(num)
    except UsageError as error:
        return error

def run():
    print(attempt(1), attempt(3), attempt(2), attempt(4))
    pid = os.fork()
    if pid == 0:
        print(attempt(3), attempt(5))
        os._exit(0)
    os.waitpid(pid, 0)
    found = []
    threads = [threading.Thread(target=lambda num=num: found.append(attempt(num))) for num in (4, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sorted(found))
    current_worker().names.on_change(lambda name, holder: print("callback:", attempt(9)))
    print(attempt(7))
"""
PORTS = list(range(20_100, 20_110))


def test_it_asks_for_what_it_lacks(agent: Agent) -> None:
    child = agent.load(CODE)
    child.run()

    def answered(num: int, error: str = "") -> None:
        assert child.expect(PortsWanted) == PortsWanted(num=num)
        child.say(PortsHeld(num=9, error="an answer to an earlier request, for which nobody waits any more"))
        child.say(PortsHeld(num=num, ports=[] if error else PORTS[:num], error=error))

    answered(1)
    answered(3)
    answered(4, error="node n1 has not 1 more ports")
    for _ in range(2):  # two threads ask at once
        wanted = child.expect(PortsWanted)
        child.say(PortsHeld(num=wanted.num, ports=PORTS[: wanted.num]))
    assert child.expect(PortsWanted) == PortsWanted(num=7)
    alive = Reachability.ALIVE
    other = DirectoryEntry(worker="other_1-0_1-0", incarnation=0, state=alive, names={"x": 1}, revision=1)
    child.say(DirectoryNews(entries=[other]))
    child.say(PortsHeld(num=7, ports=PORTS[:7]))
    child.expect(Finished)
    first, forked, together, called_back, last = child.output.read_text().splitlines()
    assert first == f"{PORTS[:1]} {PORTS[:3]} {PORTS[:2]} node n1 has not 1 more ports"
    refused = "ports(5): a process that was forked from a worker cannot ask the agent"
    assert forked.startswith(f"{PORTS[:3]} {refused}")
    assert together == str([PORTS[:4], PORTS[:6]])
    assert called_back.startswith("callback: ports(9): an on_change callback cannot ask the agent"), called_back
    assert last == str(PORTS[:7])


SCRIPT = """
import os, sys
from unified import current_worker
print(sys.argv[1:], os.environ["URL"], os.environ["FIXED"], current_worker().ports(2), flush=True)
"""


def test_a_script_has_its_ports_in_its_arguments_and_variables(agent: Agent) -> None:
    path = agent.write("serve.py", SCRIPT)
    entry = EntryPoint(kind="script", target=str(path), argv=["--port", "{port}", "--json={'a': {port1}}", "${port}"])
    envs = {"URL": "http://h:{port1}/{x}", "FIXED": "{}"}
    launch = msgspec.structs.replace(agent.describe(entry, envs=envs), ports=[20_100, 20_200])
    child = Child(launch, agent.folder)
    agent.children.append(child)
    child.run()
    child.expect(Finished)
    expected = ["--port", "20100", "--json={'a': 20200}", "${port}"]
    assert child.output.read_text() == f"{expected} http://h:20200/{{x}} {{}} [20100, 20200]\n"
