"""One job: the nodes that it uses, and what it says of its workers, its stage and its outcome."""

from typing import Any

import pytest

from tests.support.master import USER, Bench, elastic, simple
from tests.support.sim.sim_agent import SimAgent, resources
from tests.support.sim.world import World
from unified.job.spec import JobSpec, Resources, RoleSpec
from unified.protocol.agent_master import DesiredWorkers
from unified.protocol.client_master import Done, GetJob, JobStatus, Refused, RestartWorkers, SubmitJob
from unified.protocol.records import Stage
from unified_master.core.job_faults import faults_of


def world(**nodes: dict[str, Any]) -> World:
    """Agents by name, each with what it offers and its labels."""
    made = World()
    for name, offer in nodes.items():
        made.add(SimAgent(name, resources(**{key: amount for key, amount in offer.items() if key != "labels"}),
                          labels=offer.get("labels")))  # fmt: skip
    made.run(0.1)
    return made


def submit(to: World, *roles: RoleSpec, **options: Any) -> None:
    to.ask(SubmitJob(spec=JobSpec(name="job", roles=list(roles), **options)))


def placed(on: World) -> list[str]:
    return [event.reason for event in on.log if event.event == "job-placed"]


def test_a_job_waits_where_node_num_has_no_room_for_it() -> None:
    cluster = world(n1={"devices": 1}, n2={"devices": 1})
    submit(cluster, elastic(accelerator=1))
    assert cluster.job("job").reason == "waits: it fits on 2 nodes, and may use 1 (node_num)"
    cluster.add(SimAgent("n3", resources(devices=2)))
    cluster.until_stage("job", Stage.RUNNING)
    assert placed(cluster) == ["placed on n3 (2)"]


def test_a_job_that_would_use_more_nodes_is_refused_at_once_if_it_may_not_wait() -> None:
    cluster = world(n1={"devices": 1}, n2={"devices": 1})
    spec = JobSpec(name="job", roles=[elastic(accelerator=1)])
    answer = cluster.get(Refused, SubmitJob(spec=spec, wait=False))
    assert "may use 1 (node_num)" in answer.reason


def test_groups_that_share_a_node_for_want_of_room_say_so() -> None:
    cluster = world(n1={"devices": 2}, n2={"devices": 0})
    submit(cluster, elastic(accelerator=1), node_num=2)
    text = "placed on n1 (2); the 2 groups of role e share 1 node, because other nodes have no room"
    assert placed(cluster) == [text]
    cluster = world(n1={"devices": 2}, n2={"devices": 2})
    submit(cluster, elastic(accelerator=1), node_num=2)
    assert placed(cluster) == ["placed on n1 (1), n2 (1)"]


def test_a_worker_that_moves_stays_within_node_num() -> None:
    bench = Bench(elastic(accelerator=1), simple(), nodes=3, devices=1, node_num=2, failover_exec=2)
    lost = bench.worker("e", 1).node
    bench.world.kill_agent(lost)
    bench.world.until(lambda: bench.worker("e", 1).incarnation == 1, "the restart")
    bench.running()
    assert lost not in {worker.node for worker in bench.job.ranks("e")}


HEAD: dict[str, Any] = {"devices": 0, "HEAD": 1}


@pytest.mark.parametrize("word", ["HEAD", "pool", "pool=head"])
def test_the_store_host_is_where_its_isolation_says(word: str) -> None:
    head = HEAD if word == "HEAD" else {"labels": {"pool": "head"}}
    cluster = world(n1={"devices": 2}, n2=head, n3={"devices": 2})
    submit(cluster, elastic(accelerator=1), master_isolation_resource=word)
    cluster.until_stage("job", Stage.RUNNING)
    assert placed(cluster) == ["placed on n1 (2); its store host on n2"]
    store = cluster.job("job").store
    assert store is not None
    held = store.allocation.user_defined if store.allocation else None
    assert (store.node, held) == ("n2", {"HEAD": 1.0} if word == "HEAD" else {})
    run = cluster.job("job").ranks("e")[0].run
    assert run is not None
    assert run.store_host == "10.0.0.2"


def test_a_store_host_whose_node_is_lost_goes_to_another_like_it_or_its_job_waits() -> None:
    cluster = world(n1={"devices": 2}, n2=HEAD, n3=HEAD)
    submit(cluster, elastic(accelerator=1), master_isolation_resource="HEAD", failover_exec=2)
    cluster.until_stage("job", Stage.RUNNING)
    job = cluster.job("job")
    assert job.store is not None
    cluster.kill_agent(job.store.node)
    cluster.until(lambda: job.store is not None and job.store.node == "n3" and job.roles["e"].round == 2, "round 2")
    assert [worker.node for worker in job.ranks("e")] == ["n1", "n1"]
    cluster.kill_agent("n3")
    cluster.until(lambda: "the resource or label 'HEAD', and there is none" in job.reason, "the job to wait")
    assert job.is_waiting
    cluster.add(SimAgent("n2", resources(**HEAD), incarnation="b"))
    cluster.until_stage("job", Stage.RUNNING)
    assert (job.store.node, job.store.state) == ("n2", "READY")


def test_what_the_store_host_holds_is_not_there_for_others() -> None:
    cluster = world(n1={"devices": 2, "cpu": 8})
    submit(cluster, elastic(accelerator=1), master_cpu=6, master_memory_mb=1000)
    cluster.until_stage("job", Stage.RUNNING)
    needs = RoleSpec(name="s", kind="simple", entry_point=simple().entry_point, resources=Resources(cpu=3))
    cluster.ask(SubmitJob(spec=JobSpec(name="other", roles=[needs])))
    assert cluster.job("other").reason == "waits: role s needs 1 group of 3 CPU cores; the largest free node n1 has 2"


def test_numbers_that_make_no_sense_are_refused() -> None:
    spec = JobSpec(name="job", roles=[simple()], node_num=0, master_cpu=-1)
    assert list(faults_of(spec)) == [
        "job job: node_num must be at least 1.",
        "job job: master_cpu and master_memory_mb must be numbers from 0 upwards.",
    ]


def states(of: World, name: str) -> dict[str, str]:
    answer = of.get(JobStatus, GetJob(job=name))
    return {f"{worker.role}-{worker.rank}": str(worker.state) for worker in answer.workers}


def test_a_worker_that_waits_for_a_place_or_a_back_off_is_pending() -> None:
    cluster = world(n1={"devices": 1})
    submit(cluster, elastic(accelerator=1), failover_exec=2)
    assert states(cluster, "job") == {"e-0": "PENDING", "e-1": "PENDING"}
    cluster.add(SimAgent("n1", resources(devices=2), incarnation="b"))
    cluster.run(0.01)
    assert states(cluster, "job") == {"e-0": "STARTING", "e-1": "STARTING"}
    cluster.run(1)
    assert states(cluster, "job") == {"e-0": "RUNNING", "e-1": "RUNNING"}
    for _ in range(2):  # fails at once, so that the second restart waits
        agent = cluster.sim_agent("n1")
        cluster.say("n1", agent.end("job-1", "e_2-0_1-0", USER))
        cluster.run(0.3)
    assert states(cluster, "job") == {"e-0": "PENDING", "e-1": "PENDING"}
    cluster.kill_agent("n1")
    cluster.until(lambda: cluster.job("job").is_waiting, "the job to wait")
    assert states(cluster, "job") == {"e-0": "PENDING", "e-1": "PENDING"}


def test_an_order_to_run_is_sent_by_a_job_that_is_running() -> None:
    cluster = world(n1={"devices": 0})
    stages: list[str] = []

    def watch(_now: float, _who: str, what: object) -> None:
        if isinstance(what, DesiredWorkers) and any(worker.run for worker in what.workers):
            stages.append(str(cluster.job("job").stage))

    cluster.watch = watch
    submit(cluster, simple(), elastic())
    cluster.run(1)
    assert set(stages) == {"RUNNING"}


def test_the_outcome_is_known_before_the_last_worker_is_gone() -> None:
    cluster = world(n1={"devices": 0})
    submit(cluster, simple(), simple("service", is_driver=False))
    cluster.run(1)
    agent = cluster.sim_agent("n1")
    agent.is_stuck = True
    cluster.say("n1", agent.finish("job-1", "s_1-0_1-0"))
    cluster.run(0.1)
    answer = cluster.get(JobStatus, GetJob(job="job"))
    assert (answer.stage, answer.exit_code, answer.outcome) == (Stage.STOPPING, None, 0)


def test_a_restart_on_request_says_which_incarnations_will_be() -> None:
    cluster = world(n1={"devices": 0})
    submit(cluster, elastic(), simple(total=2))
    cluster.run(1)
    done = cluster.get(Done, RestartWorkers(job="job", workers=["e-1"]))
    assert done.incarnations == {"e_2-0_1-0": 1, "e_2-1_1-0": 1}
    done = cluster.get(Done, RestartWorkers(job="job", workers=[]))
    assert done.incarnations == {"e_2-0_1-0": 2, "e_2-1_1-0": 2, "s_2-0_1-0": 1, "s_2-1_1-0": 1}
