"""A real agent's probes: alive from its start, ready while it is registered."""

from pathlib import Path

from tests.support.agents import AgentProcess, PlayedMaster, eventually
from tests.support.ports import unused_port
from tests.support.probes import get, get_or_none


def test_an_agent_is_ready_while_it_is_registered(tmp_path: Path, agents: list[AgentProcess]) -> None:
    port, master = unused_port(), PlayedMaster()
    agents.append(AgentProcess(tmp_path, master.address, "--health-bind", f"127.0.0.1:{port}"))
    assert eventually(lambda: get_or_none(port, "/healthz") == (200, "ok"))
    assert get(port, "/readyz") == (503, "the agent is not registered with a master")
    master.welcome()
    assert eventually(lambda: get(port, "/readyz") == (200, "ok"))
    master.hang_up()
    assert get(port, "/healthz") == (200, "ok"), "it is its own loop that counts"
