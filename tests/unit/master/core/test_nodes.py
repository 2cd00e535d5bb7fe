"""Nodes whose agents stop in order, are displaced by another, and jobs too heavy to send to any of them."""

import msgspec
import pytest

from tests.support.master import COLLATERAL, CRASH, Bench, elastic, simple
from tests.support.sim.sim_agent import SimAgent, resources
from unified.job.spec import Blob, JobSpec
from unified.protocol.agent_master import (
    AgentDied,
    AgentLeaving,
    AgentPulse,
    AgentRefused,
    DesiredWorkers,
    HeartbeatSeen,
    MasterToAgent,
    RegisterAgent,
)
from unified.protocol.client_master import MasterAnswer, Refused, StopJob, SubmitJob
from unified.protocol.records import Failure, NodeState, Stage
from unified_master.core.job_faults import MAX_SPEC_BYTES
from unified_master.core.messages import Received, Send

TAKEN_ALONG = Failure(summary="its agent stopped: SIGTERM", category="node")


def leave(bench: Bench, node: str) -> None:
    agent = bench.agent(node)
    last_word = AgentLeaving(node=node, incarnation=agent.incarnation, reason="SIGTERM")
    bench.world.core.step(bench.world.now, Received(peer=bench.world.core.cluster.nodes[node].peer, message=last_word))
    bench.world.kill_agent(node)


def test_an_agent_that_stops_in_order_is_the_root_cause_of_what_its_peers_suffer() -> None:
    bench = Bench(elastic(accelerator=1, max_restart=0), nodes=3, devices=1)
    bench.end("e", 1, TAKEN_ALONG)
    bench.end("e", 0, COLLATERAL)
    bench.world.run(3.0)  # longer than a suspect waits where nobody leaves; the agent still stops its other workers
    assert bench.job.stage is Stage.RUNNING
    leave(bench, bench.worker("e", 1).node)
    bench.running()
    assert bench.incarnations() == {"e-0": 1, "e-1": 1}
    assert (bench.job.node_losses, [worker.num_failures for worker in bench.job.ranks("e")]) == ({"n2": 1}, [0, 0])


def test_a_driver_that_its_agent_took_along_has_not_finished() -> None:
    bench = Bench(simple(), nodes=2, failover_exec=2)
    bench.end("s", 0, TAKEN_ALONG)
    leave(bench, bench.worker("s").node)
    bench.running()
    assert bench.incarnations() == {"s-0": 1}
    assert bench.job.exit_code is None
    events = [event.event for event in bench.world.core.cluster.events[bench.job.job_id]]
    assert events.count("worker-failed") == 1, "it is told once, not again when its node is given up"


def test_workers_of_an_agent_that_is_killed_while_it_stops_are_missed_too() -> None:
    bench = Bench(simple(), nodes=2, failover_exec=2)
    node = bench.worker("s").node
    bench.end("s", 0, TAKEN_ALONG)
    bench.world.kill_agent(node)
    bench.world.until(lambda: bench.world.core.cluster.nodes[node].state is NodeState.LOST, "the lease to run out")
    bench.running()
    assert bench.incarnations() == {"s-0": 1}


def test_a_crash_on_a_node_that_stays_is_still_a_crash() -> None:
    bench = Bench(elastic(accelerator=1), nodes=3, devices=1)
    bench.restart("e", 1, CRASH)
    assert bench.worker("e", 1).num_failures == 1


@pytest.mark.parametrize("was_lost", [False, True])
def test_an_agent_that_was_displaced_is_not_let_in_again(was_lost: bool) -> None:
    bench = Bench(simple())
    first = bench.world.core.cluster.nodes["n1"].info
    if was_lost:
        bench.world.kill_agent("n1")
        bench.world.run(20.0)
        assert bench.world.core.cluster.nodes["n1"].state is NodeState.LOST
    second = msgspec.structs.replace(first, incarnation="second", pid=2)

    def register(info: RegisterAgent, peer: bytes) -> list[object]:
        actions = bench.world.core.step(bench.world.now, Received(peer=peer, request_id=1, message=info))
        return [action.message for action in actions if isinstance(action, Send) and action.peer == peer]

    assert not any(isinstance(answer, AgentRefused) for answer in register(second, b"second"))
    (refused,) = register(first, b"first")
    assert isinstance(refused, AgentRefused)
    assert refused.retry_after_s is None
    assert "node id n1 was taken over by the agent on n1.local with pid 2" in refused.reason
    assert bench.world.core.cluster.nodes["n1"].info.incarnation == "second"


def test_a_job_too_heavy_for_the_control_connection_is_refused_by_name() -> None:
    bench = Bench(simple())
    bench.world.add(SimAgent("n9", resources()))
    heavy = simple("big", envs={"BIG": "x" * MAX_SPEC_BYTES})
    answer = bench.world.get(Refused, SubmitJob(spec=JobSpec(name="heavy", roles=[heavy])))
    assert "the environment of role big has 8.0" in answer.reason
    config = Blob(codec="msgpack", data=b"x" * MAX_SPEC_BYTES)
    answer = bench.world.get(Refused, SubmitJob(spec=JobSpec(name="heavy", roles=[simple()], user_config=config)))
    assert "the job's config has 8.0" in answer.reason


def test_a_job_whose_stop_cuts_the_end_of_a_program_short_has_failed() -> None:
    bench = Bench(simple("d"), simple("s", is_driver=False))
    agent = bench.agent()
    agent.is_stuck = True
    bench.finish("d")
    assert bench.job.stage is Stage.STOPPING
    bench.end("s", 0, Failure(summary="its end was cut short after 9.0 s", is_cut=True))
    assert bench.limit() == "stop_grace_s=10"
    assert bench.job.reason.startswith("failed: s_1-0_1-0 on n1: its end was cut short after 9.0 s; stop_grace_s=10 is")


def test_ctrl_c_reaches_the_agents_as_such() -> None:
    bench = Bench(simple())
    stop = Received(peer=b"client", message=StopJob(job="job", interrupt=True))
    sent = [action.message for action in bench.world.core.step(bench.world.now, stop) if isinstance(action, Send)]
    [order] = [message for message in sent if isinstance(message, DesiredWorkers)]
    assert [job.is_interrupted for job in order.jobs] == [True]


def keeper_says(bench: Bench, word: AgentDied | AgentPulse) -> list[MasterToAgent | MasterAnswer]:
    """What the master answers to the lease keeper of an agent."""
    event = Received(peer=b"keeper", request_id=7, message=word)
    actions = bench.world.core.step(bench.world.now, event)
    bench.world.run(0)
    return [action.message for action in actions if isinstance(action, Send) and action.peer == b"keeper"]


def test_an_agent_whose_process_ended_is_lost_at_once() -> None:
    bench = Bench(simple(), nodes=2, failover_exec=2)
    lost = bench.worker("s").node
    incarnation = bench.agent(lost).incarnation
    bench.world.kill_agent(lost)
    at = bench.world.now
    died = AgentDied(node=lost, incarnation=incarnation, reason="its agent (pid 7) ended")
    bench.world.step(Received(peer=b"n1/1", request_id=7, message=died))
    bench.running()
    assert bench.world.now - at < 1
    assert bench.incarnations() == {"s-0": 1}
    assert bench.world.core.cluster.nodes[lost].reason == "its agent (pid 7) ended"
    assert keeper_says(bench, died) == [HeartbeatSeen()], "said again, it changes nothing and is answered all the same"


def test_the_keeper_of_an_earlier_agent_says_nothing_of_the_next() -> None:
    bench = Bench(simple())
    assert keeper_says(bench, AgentDied(node="n1", incarnation="another", reason="ended")) == [HeartbeatSeen()]
    assert bench.world.core.cluster.nodes["n1"].state is NodeState.ALIVE
    assert keeper_says(bench, AgentPulse(node="n1", incarnation="another")) == []
    assert keeper_says(bench, AgentPulse(node="n9", incarnation="a")) == []


def is_alive(bench: Bench) -> bool:
    return bench.world.core.cluster.nodes["n1"].state is NodeState.ALIVE


def test_a_lease_is_renewed_in_the_stead_of_an_agent_that_is_silent() -> None:
    bench = Bench(simple())
    incarnation = bench.agent().incarnation
    bench.world.cut.add("n1")
    for _ in range(40):
        bench.world.run(1)
        assert keeper_says(bench, AgentPulse(node="n1", incarnation=incarnation)) == [HeartbeatSeen()]
    assert is_alive(bench)
    bench.world.run(20)
    assert not is_alive(bench)


def test_an_agent_that_ended_its_workers_because_it_was_cut_off_has_lost_them() -> None:
    bench = Bench(simple())
    agent = bench.agent()
    info = msgspec.structs.replace(bench.world.core.cluster.nodes["n1"].info, cut_off="cut off for 12.0 s")
    agent.incarnations.clear()
    bench.world.step(Received(peer=b"n1/1", request_id=3, message=info))
    bench.running()
    assert bench.incarnations() == {"s-0": 1}
    assert bench.job.node_losses == {"n1": 1}
