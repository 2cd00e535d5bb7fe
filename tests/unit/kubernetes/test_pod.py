"""Command lines of the processes of a run's pod, as the daemons' own parsers read them."""

from pathlib import Path

import unified_agent.cli
import unified_master.cli
from unified.kubernetes.pod import PodPlace, commands

PLACE = PodPlace(
    node_id="llm-0",
    address="10.0.0.7",
    master_host="llm-0.llm",
    health_bind="0.0.0.0:8081",
    grace_s=60.0,
)


def test_the_first_pod_has_master_agent_and_driver() -> None:
    found = commands(PLACE, ["unified", "submit", "job.py"], Path("/var/address"))
    assert list(found) == ["master", "agent", "driver"]
    assert found["driver"] == ["unified", "submit", "job.py"]
    assert found["master"][1:4] == ["-P", "-m", "unified_master"]
    master = unified_master.cli.build_parser().parse_args(found["master"][4:])
    assert (master.bind, master.relay_bind) == ("tcp://0.0.0.0:7077", "tcp://0.0.0.0:7078")
    assert (master.advertise, master.address_file) == ("llm-0.llm", Path("/var/address"))
    agent = unified_agent.cli.build_parser().parse_args(found["agent"][4:])
    assert (agent.master, agent.node_id, agent.address) == ("tcp://llm-0.llm:7077", "llm-0", "10.0.0.7")
    assert agent.health_bind == "0.0.0.0:8081"


def test_the_other_pods_have_an_agent_alone() -> None:
    place = PodPlace(node_id="llm-3", address="::1", master_host="llm-0.llm", health_bind="*:1", grace_s=1.0)
    found = commands(place, ["unified", "submit", "job.py"], Path("/var/address"))
    assert list(found) == ["agent"]
    assert unified_agent.cli.build_parser().parse_args(found["agent"][4:]).node_id == "llm-3"
