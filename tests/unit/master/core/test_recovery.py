"""What follows from a failure, rule by rule and budget by budget, in virtual time."""

from typing import Any

import msgspec
import pytest

from tests.support.master import COLLATERAL, CRASH, SETUP, USER, Bench, elastic, simple
from tests.support.sim.sim_agent import SimAgent, resources
from unified.job.spec import JobSpec, RoleSpec
from unified.protocol.client_master import GetJob, JobStatus, RestartWorkers, SubmitJob
from unified.protocol.records import Failure, NodeState, Progress, Reachability, Stage
from unified_master.core.clients.status import job_status
from unified_master.core.messages import MasterTick, SaveRecord


def test_strategy_2_restarts_the_role_of_an_elastic_worker_that_crashed() -> None:
    bench = Bench(elastic(), simple(), failover_exec=2)
    bench.restart("e", 1, CRASH)
    assert bench.incarnations() == {"e-0": 1, "e-1": 1, "s-0": 0}
    assert [bench.worker("e", rank).round for rank in (0, 1)] == [2, 2]
    assert bench.job.roles["e"].round == 2
    assert bench.worker("e").run != bench.worker("e", 1).run
    prefixes = {worker.run.store_prefix for worker in bench.job.ranks("e") if worker.run}
    assert prefixes == {"job-1/e/2"}
    assert (bench.worker("e", 1).num_failures, bench.worker("e", 0).num_failures) == (1, 0)
    assert bench.job.num_restarts == 0


def test_a_setup_failure_is_never_repaired() -> None:
    bench = Bench(elastic())
    bench.end("e", 0, msgspec.structs.replace(SETUP, summary="there is no module 'x'. Name its folder."))
    assert bench.job.reason.endswith("Name its folder; not restarted: a setup failure would happen again")
    assert bench.limit() == "not restarted: a setup failure would happen again"


def test_the_end_names_worker_incarnation_node_failure_and_limit() -> None:
    bench = Bench(elastic(max_restart=1))
    bench.restart("e", 1, CRASH, settle_s=2)
    bench.end("e", 1, CRASH)
    assert bench.limit() == "max_restart"
    end = bench.job.end
    assert end is not None
    assert (end.worker, end.incarnation, end.node, end.failure) == ("e_2-1_1-0", 1, "n1", CRASH)
    assert end.log_file == "/logs/job-1/e_2-1_1-0/1.err"
    assert "max_restart=1" in bench.job.reason
    assert "killed by SIGKILL" in bench.job.reason


def test_max_restart_is_counted_for_each_worker() -> None:
    bench = Bench(elastic(max_restart=1))
    bench.restart("e", 0, CRASH, settle_s=2)
    bench.restart("e", 1, CRASH)
    assert bench.incarnations() == {"e-0": 2, "e-1": 2}


@pytest.mark.parametrize(
    ("role", "restarted", "last", "limit"),
    [
        (elastic(max_restart=0), [], 0, "max_restart"),
        (elastic(max_restart=6), [0, 1] * 5, 0, "job_max_restart"),  # without role_max_restart
        (elastic(max_restart=3), [0, 0, 0], 0, "max_restart"),
    ],
)
def test_a_limit_ends_the_job(role: RoleSpec, restarted: list[int], last: int, limit: str) -> None:
    bench = Bench(role)
    for rank in restarted:
        bench.restart("e", rank, CRASH, settle_s=2)
    bench.end("e", last, CRASH)
    assert bench.limit() == limit


@pytest.mark.parametrize("failure", [CRASH, USER])
def test_role_max_restart_bounds_the_group_whoever_fails_and_wherever(failure: Failure) -> None:
    bench = Bench(elastic(max_restart=6, role_max_restart=6), job_max_restart=2)
    for attempt in range(6):
        bench.restart("e", attempt % 2, failure)
        assert bench.incarnations() == {"e-0": attempt + 1, "e-1": attempt + 1}
        bench.world.run(2)
    assert bench.job.excluded == []
    bench.end("e", 1, failure)
    assert bench.limit() == "role_max_restart"


def test_a_node_with_too_many_failures_is_excluded_and_its_group_moves() -> None:
    bench = Bench(elastic(total=1, accelerator=1, per_node_max_failure=0), nodes=2, devices=1)
    assert bench.worker("e").node == "n1"
    bench.restart("e", 0, CRASH)
    assert (bench.worker("e").node, bench.job.excluded) == ("n2", ["n1"])
    assert bench.worker("e").past[0].node == "n1"


@pytest.mark.parametrize(("failover_exec", "event"), [(1, "job-restarts"), (2, "role-restarts")])
def test_a_restart_that_the_limits_forbid_is_neither_counted_nor_told(failover_exec: Any, event: str) -> None:
    bench = Bench(elastic(max_restart=1), failover_exec=failover_exec)
    bench.restart("e", 0, USER, settle_s=2)
    bench.end("e", 0, USER)
    assert bench.limit() == "max_restart"
    events = [event.event for event in bench.world.core.cluster.events["job-1"]]
    assert (events.count(event), events.count("job-stops")) == (1, 1)
    assert (bench.job.num_restarts, bench.job.num_charged_restarts) == ((1, 1) if failover_exec == 1 else (0, 0))
    assert bench.job.roles["e"].num_restarts == 1


def test_an_excluded_job_waits_if_the_others_are_only_busy() -> None:
    bench = Bench(elastic(total=1, accelerator=1, per_node_max_failure=0), nodes=2, devices=1)
    bench.world.ask(SubmitJob(spec=JobSpec(name="other", roles=[elastic("x", 1, 1)])))
    bench.world.until_stage("other", Stage.RUNNING)
    bench.end("e", 0, CRASH)
    bench.world.run(1)
    assert bench.job.is_waiting
    assert "n1 failed too often" in bench.job.reason
    agent = bench.agent("n2")
    bench.world.say("n2", agent.finish("other-2", "x_1-0_1-0"))
    bench.running()
    assert bench.worker("e").node == "n2"


def test_a_lost_node_is_charged_to_that_node_and_not_to_the_worker() -> None:
    bench = Bench(elastic(accelerator=1), nodes=3, devices=1)
    bench.world.kill_agent("n2")
    bench.world.until(lambda: bench.incarnations() == {"e-0": 1, "e-1": 1}, "the restart")
    bench.running()
    assert [worker.node for worker in bench.job.ranks("e")] == ["n1", "n3"]
    assert bench.job.node_losses == {"n2": 1}
    assert all(worker.num_failures == 0 for worker in bench.job.workers.values())
    assert (bench.store.node, bench.store.incarnation) == ("n1", 0)


def test_node_max_restart_ends_the_job() -> None:
    bench = Bench(elastic(accelerator=1), nodes=3, devices=1, node_max_restart=0)
    bench.world.kill_agent("n1")
    assert bench.limit() == "node_max_restart"
    assert bench.job.end is not None
    assert bench.job.end.failure.category == "node"


def test_node_max_restart_is_counted_for_each_node() -> None:
    bench = Bench(elastic(accelerator=1), nodes=3, devices=1, node_max_restart=1)
    for losses, node in enumerate(("n1", "n2", "n3"), 1):
        bench.world.kill_agent(node)
        bench.world.until(lambda losses=losses: len(bench.job.node_losses) == losses, f"the loss of {node}")  # type: ignore[misc]
        bench.world.add(SimAgent(node, resources(devices=1), incarnation=f"b{losses}"))
        bench.running()
    assert bench.job.node_losses == {"n1": 1, "n2": 1, "n3": 1}
    bench.world.kill_agent(bench.worker("e").node)
    assert bench.limit() == "node_max_restart"
    assert "node_max_restart=1 is used up for node n" in bench.job.reason


def test_job_max_restart_ends_the_job() -> None:
    bench = Bench(simple(), job_max_restart=1)
    bench.restart("s", 0, USER, settle_s=2)
    bench.end("s", 0, USER)
    assert bench.limit() == "job_max_restart"
    assert bench.job.num_restarts == 1


def test_a_failure_that_a_peer_s_end_caused_names_the_peer() -> None:
    bench = Bench(elastic(total=3, max_restart=0))
    ended = bench.worker("e", 2)
    agent = bench.agent(ended.node)
    bench.world.say(ended.node, agent.report_progress("job-1", ended.name, 1, num_collectives=29))
    bench.finish("e", 2)
    bench.end("e", 1, COLLATERAL)
    bench.stopped()
    assert bench.job.end is not None
    summary = bench.job.end.failure.summary
    assert summary == "the program of rank 2 had ended after 29 collectives, and rank 1 went on: connection closed"


def test_a_peer_that_ended_after_the_same_collective_is_not_named() -> None:
    bench = Bench(elastic(total=3, max_restart=0))
    for rank in (1, 2):
        worker = bench.worker("e", rank)
        report = bench.agent(worker.node).report_progress("job-1", worker.name, 1, num_collectives=28 + rank)
        bench.world.say(worker.node, report)
    bench.finish("e", 1)
    bench.finish("e", 2)
    last = bench.worker("e", 0)
    report = bench.agent(last.node).report_progress("job-1", last.name, 1, num_collectives=30)
    bench.world.say(last.node, report)
    bench.end("e", 0, COLLATERAL)
    bench.stopped()
    assert bench.job.end is not None
    summary = bench.job.end.failure.summary
    assert (
        summary
        == "the program of rank 1 had ended after 29 collectives, and rank 0 was in collective 30: connection closed"
    )


def test_only_the_root_cause_is_charged_in_whatever_order_failures_come() -> None:
    bench = Bench(elastic(total=3))
    bench.end("e", 1, COLLATERAL)
    bench.end("e", 2, COLLATERAL)
    assert bench.incarnations() == {"e-0": 0, "e-1": 0, "e-2": 0}
    bench.restart("e", 0, CRASH)
    assert [worker.num_failures for worker in bench.job.ranks("e")] == [1, 0, 0]
    bench.world.run(2)
    bench.restart("e", 0, CRASH)
    assert [worker.num_failures for worker in bench.job.ranks("e")] == [2, 0, 0]


def test_a_suspect_waits_for_the_lease_of_a_node_that_is_late() -> None:
    bench = Bench(elastic(accelerator=1), nodes=3, devices=1)
    bench.world.cut.add("n2")
    bench.world.run(2.5)
    bench.end("e", 0, COLLATERAL)
    bench.world.until(lambda: bench.incarnations() == {"e-0": 1, "e-1": 1}, "the restart")
    assert [worker.num_failures for worker in bench.job.ranks("e")] == [0, 0]
    assert bench.job.node_losses == {"n2": 1}


def test_a_new_master_does_not_settle_before_every_node_has_reported_to_it() -> None:
    bench = Bench(elastic(accelerator=1), nodes=2, devices=1)
    bench.world.cut.add("n2")
    bench.end("e", 0, COLLATERAL)
    bench.world.restart_master()
    bench.world.run(3)
    assert bench.incarnations() == {"e-0": 0, "e-1": 0}
    bench.world.cut.clear()
    bench.running()
    assert [worker.num_failures for worker in bench.job.ranks("e")] == [1, 0]


def test_a_master_that_was_not_there_to_listen_loses_no_node() -> None:
    bench = Bench(elastic())
    world = bench.world
    world.now += 60.0  # its process was stopped, or its machine slept
    world.step(MasterTick())
    assert world.core.cluster.nodes["n1"].state is NodeState.ALIVE
    world.run(20)
    assert bench.incarnations() == {"e-0": 0, "e-1": 0}
    assert bench.job.node_losses == {}


def test_a_node_is_spared_once_in_a_silence() -> None:
    world = Bench(elastic()).world
    world.cut.add("n1")
    for state in (NodeState.ALIVE, NodeState.LOST):
        world.now += 60.0
        world.step(MasterTick())
        assert world.core.cluster.nodes["n1"].state is state


def test_a_master_that_was_late_gives_as_much_time_and_no_more() -> None:
    world = Bench(elastic()).world
    world.cut.add("n1")
    node = world.core.cluster.nodes["n1"]
    late_s = 4.0
    world.now = node.seen_at + world.intervals.lease_s + late_s
    world.step(MasterTick())
    assert node.reason == ""
    world.until(lambda: node.state is NodeState.LOST, "the node to be lost")
    least = world.intervals.lease_s + 2 * late_s
    assert least <= world.now - node.seen_at <= least + 6


def test_no_lease_is_judged_before_what_has_come_is_read() -> None:
    world = Bench(elastic()).world
    world.cut.add("n1")
    for _ in range(20):
        world.now += 60.0
        world.step(MasterTick(is_behind=True))
    assert world.core.cluster.nodes["n1"].reason == ""


def test_nodes_are_awaited_as_long_as_a_master_that_stopped_in_order_told_them_to_wait() -> None:
    world = Bench(elastic()).world
    for action in world.core.stop(world.now):
        if isinstance(action, SaveRecord):
            assert action.data is not None
            world.stored[action.kind, action.key] = action.data
    told_at = world.now
    world.cut.add("n1")
    for _ in range(3):  # an end without a word does not make it forget
        world.restart_master()
        world.run(20)
    node = world.core.cluster.nodes["n1"]
    world.until(lambda: node.state is NodeState.LOST, "the node to be lost", limit_s=400)
    assert world.now - told_at >= world.intervals.away_s
    world.run(10)
    world.restart_master()
    assert ("meta", "away_until") not in world.stored


def test_each_start_of_a_master_has_an_event_of_its_own() -> None:
    world = Bench(elastic()).world
    for _ in range(3):
        world.run(5)
        world.restart_master()
    sequences = [event.sequence for event in world.log]
    assert sequences == sorted(set(sequences))


def reasons(bench: Bench) -> dict[str, str]:
    answer = bench.world.get(JobStatus, GetJob(job="job"))
    return {f"{worker.role}-{worker.rank}": worker.reason for worker in answer.workers}


def test_a_worker_shows_the_last_decision_that_concerned_it() -> None:
    bench = Bench(simple("driver", 2, restart_alone=True), simple("service", is_driver=False))
    bench.restart("driver", 0, CRASH)
    assert reasons(bench)["driver-0"].startswith("worker restarts: driver_2-0_1-0 on n1: killed by SIGKILL")
    bench.finish("driver", 0)
    bench.end("driver", 1, None)
    bench.stopped()
    assert reasons(bench) == {
        "driver-0": "finished: its entry point returned",
        "driver-1": "finished: it ended without a failure",
        "service-0": "stopped with its job: done: every worker that the job waits for has finished",
    }


def test_a_failed_worker_shows_its_failure_and_the_others_why_they_were_stopped() -> None:
    bench = Bench(simple(total=2), failover_exec=0)
    bench.end("s", 1, USER)
    bench.stopped()
    why = "failed: s_2-1_1-0 on n1: ValueError: boom; failover_exec_strategy=0 stops the job at a failure"
    assert reasons(bench) == {"s-0": f"stopped with its job: {why}", "s-1": "ValueError: boom"}


def test_callers_are_told_why_an_incarnation_ended() -> None:
    bench = Bench(elastic(), failover_exec=2)
    bench.end("e", 0, CRASH)
    entries = [worker.entry for worker in bench.job.ranks("e")]
    assert [entry and entry.state for entry in entries] == [Reachability.DEAD, Reachability.DEAD]
    told = [entry.reason if entry else "" for entry in entries]
    assert told[0] == "killed by SIGKILL"
    assert told[1].startswith("role e restarts: e_2-0_1-0 on n1: killed by SIGKILL")


def test_a_driver_that_has_finished_cannot_fail_any_more() -> None:
    bench = Bench(simple(total=2))
    bench.finish("s", 0)
    bench.end("s", 0, CRASH)
    bench.world.run(2)
    assert bench.incarnations() == {"s-0": 0, "s-1": 0}
    bench.finish("s", 1)
    assert bench.stopped().exit_code == 0


def test_a_service_that_has_returned_and_then_crashes_is_restarted() -> None:
    bench = Bench(simple("driver"), simple("service", is_driver=False), failover_exec=2)
    bench.finish("service")
    bench.restart("service", 0, CRASH)
    assert bench.incarnations() == {"driver-0": 0, "service-0": 1}


@pytest.mark.parametrize("failover_trigger", [1, 2])
def test_a_service_restarts_alone_and_is_charged_alone(failover_trigger: Any) -> None:
    bench = Bench(elastic("trainer"), simple("s", 2, max_restart=1), failover_exec=1, failover_trigger=failover_trigger)
    for rank in (0, 1):
        bench.serve("s", rank)
    bench.restart("s", 1, CRASH)
    assert bench.incarnations() == {"trainer-0": 0, "trainer-1": 0, "s-0": 0, "s-1": 1}
    assert bench.job.num_charged_restarts == 0
    bench.end("s", 1, CRASH)
    assert bench.limit() == "max_restart"


def test_a_service_that_is_said_to_be_one_restarts_alone_before_it_serves() -> None:
    bench = Bench(simple("driver"), simple("s", is_service=True), failover_exec=1)
    bench.restart("s", 0, USER)
    assert bench.incarnations() == {"driver-0": 0, "s-0": 1}
    bench.finish("driver")
    assert bench.stopped().exit_code == 0


def test_ranks_of_a_service_restart_together_and_nobody_else() -> None:
    bench = Bench(simple("driver"), elastic("s", is_service=True), failover_exec=1)
    bench.serve("s", 0)
    bench.restart("s", 1, CRASH)
    assert bench.incarnations() == {"driver-0": 0, "s-0": 1, "s-1": 1}


def test_a_job_of_services_alone_runs_until_it_is_stopped_or_all_have_ended() -> None:
    for is_driver in (True, False):
        bench = Bench(simple("s", 2, is_driver=is_driver))
        bench.serve("s", 0)
        bench.end("s", 0, None)
        bench.serve("s", 1)
        bench.world.run(60)
        assert bench.job.stage is Stage.RUNNING
        bench.end("s", 1, None)
        assert bench.stopped().exit_code == 0


def test_a_job_waits_for_no_service() -> None:
    bench = Bench(simple("driver"), simple("s"))
    bench.finish("driver")
    bench.world.run(2)
    assert bench.job.stage is Stage.RUNNING, "it may have something to run"
    bench.serve("s")
    assert bench.stopped().exit_code == 0
    assert reasons(bench)["s-0"].startswith("stopped with its job: done")
    roles = {role.name: role.is_driver for role in bench.world.get(JobStatus, GetJob(job="job")).roles}
    assert roles == {"driver": True, "s": False}


def test_a_service_is_still_known_after_its_master_restarted() -> None:
    bench = Bench(simple("driver"), simple("s"), failover_exec=1)
    bench.serve("s")
    bench.world.restart_master()
    bench.world.run(5)
    bench.restart("s", 0, CRASH)
    assert bench.incarnations() == {"driver-0": 0, "s-0": 1}


def test_services_end_with_the_drivers() -> None:
    bench = Bench(simple("driver", 2), simple("service", is_driver=False))
    bench.finish("driver", 0)
    bench.end("driver", 1, None)
    assert bench.stopped().exit_code == 0
    assert bench.entry("service").state is Reachability.ENDED


@pytest.mark.parametrize("failover_exec", [1, 2])
def test_a_lost_store_gives_the_elastic_roles_a_new_round(failover_exec: Any) -> None:
    bench = Bench(elastic(), simple(), failover_exec=failover_exec)
    bench.end_worker(bench.store, CRASH)
    bench.running()
    is_of_job = int(failover_exec == 1)
    assert bench.incarnations() == {"e-0": 1, "e-1": 1, "s-0": is_of_job}
    assert (bench.store.incarnation, bench.job.roles["e"].round, bench.job.num_charged_restarts) == (1, 2, is_of_job)


def test_ranks_that_wait_for_a_back_off_are_not_done() -> None:
    """They were stopped, and so ended without a failure, because the store was lost twice in a row."""
    bench = Bench(elastic(), failover_exec=2)
    for _ in range(2):
        bench.end_worker(bench.store, CRASH)
        bench.world.run(0.2)
    assert (bench.job.stage, bench.job.exit_code) == (Stage.RUNNING, None)
    bench.world.run(2)
    assert bench.incarnations() == {"e-0": 2, "e-1": 2}


def test_a_worker_that_never_says_hello_is_a_crash() -> None:
    bench = Bench(elastic())
    agent = bench.agent()
    agent.never_starts = True
    bench.end("e", 0, CRASH)
    bench.world.run(100)
    assert bench.incarnations() == {"e-0": 1, "e-1": 1}
    agent.never_starts = False
    bench.world.run(40)
    bench.running()
    assert bench.incarnations() == {"e-0": 2, "e-1": 2}
    assert any("did not start within 120 s" in event.reason for event in bench.world.log)


def test_the_directory_follows_the_incarnations() -> None:
    bench = Bench(simple(total=2, restart_alone=True))
    entry = bench.entry()
    assert (entry.incarnation, entry.state) == (0, Reachability.ALIVE)
    assert entry.inbox == bench.worker("s").inbox
    bench.end("s", 0, USER)
    dead = bench.entry()
    assert (dead.incarnation, dead.state, dead.reason) == (0, Reachability.DEAD, "ValueError: boom")
    bench.running()
    alive = bench.entry()
    assert (alive.incarnation, alive.state) == (1, Reachability.ALIVE)
    bench.finish("s", 0)
    bench.finish("s", 1)
    bench.stopped()
    assert all(worker.entry and worker.entry.state is Reachability.ENDED for worker in bench.job.workers.values())


def test_a_restart_on_request_is_not_charged() -> None:
    bench = Bench(elastic(max_restart=0), simple(), job_max_restart=0, failover_exec=2)
    bench.world.ask(RestartWorkers(job="job", workers=["e-1"]))
    bench.running()
    assert bench.incarnations() == {"e-0": 1, "e-1": 1, "s-0": 0}
    bench.world.ask(RestartWorkers(job="job", workers=[]))
    bench.running()
    assert bench.incarnations() == {"e-0": 2, "e-1": 2, "s-0": 1}
    assert (bench.job.num_restarts, bench.job.num_charged_restarts) == (1, 0)


def test_errors_that_nobody_read_are_counted_over_all_incarnations_of_a_worker() -> None:
    bench = Bench(simple())
    agent = bench.agent()
    for count in (3, 4):
        for incarnation, sim in agent.incarnations.items():
            if incarnation[2] == bench.worker("s").incarnation:
                sim.progress = Progress(step=1, num_unread_errors=count)
        bench.restart("s", 0, CRASH)
    assert job_status(bench.world.core.cluster, bench.job).workers[0].num_unread_errors == 7
