"""A worker's request for ports, which the agent's shell answers."""

from tests.support.agent_core import W0, W1, Driver, launched, wanted
from unified.protocol.worker_agent import PortsWanted
from unified_agent.core.messages import HoldPorts, WorkerExited, WorkerSaid


def test_the_shell_holds_the_ports_of_a_worker_that_lives() -> None:
    driver: Driver = launched(wanted(W0, 1), wanted(W1, 1))
    driver.say(W0, PortsWanted(num=3))
    assert driver.notable() == [HoldPorts(incarnation=W0, num=3)]
    driver.step(WorkerExited(incarnation=W0, code=-9))
    driver.take()
    driver.step(WorkerSaid(incarnation=W0, word=PortsWanted(num=4)))
    assert not [action for action in driver.take() if isinstance(action, HoldPorts)], "its word came too late"
