"""What clients and agents ask the master, and what they are answered."""

from typing import Any

import msgspec
import pytest
from msgspec import structs

from tests.support.master import USER, simple
from tests.support.sim.sim_agent import SimAgent, resources
from tests.support.sim.world import World
from unified.job.spec import Blob, EntryPoint, JobSpec, Resources, RoleSpec
from unified.protocol.agent_master import AgentRefused, DesiredWorkers
from unified.protocol.client_master import (
    Accepted,
    Done,
    Explain,
    GetDirectory,
    GetJob,
    JobDirectory,
    JobList,
    JobStatus,
    ListJobs,
    ListNodes,
    LogChunk,
    NodeList,
    ReadLog,
    Refused,
    RestartWorkers,
    StopJob,
    Story,
    SubmitJob,
)
from unified.protocol.records import NodeState, Progress, Stage
from unified_master.core.messages import Received, Send
from unified_master.core.state import JobRecord


def role(name: str = "a", total: int = 1, **more: Any) -> RoleSpec:
    return simple(name, total, **more)


def spec(name: str = "job", *roles: RoleSpec, **more: Any) -> JobSpec:
    return JobSpec(name=name, roles=list(roles) or [role()], **more)


@pytest.fixture
def world() -> World:
    world = World()
    world.add(SimAgent("n1", resources(devices=2)))
    world.run(0.1)
    return world


def running(world: World, name: str = "job", *roles: RoleSpec) -> JobRecord:
    assert isinstance(world.request(SubmitJob(spec=spec(name, *roles))), Accepted)
    world.until_stage(name, Stage.RUNNING)
    return world.job(name)


HARMFUL_NAMES = (
    "<img src=x onerror=alert(1)>",
    "\x1b]8;;javascript:alert(1)\x07a",
    "\u202egnp.exe",
    "a\0",
    "x" * 10_000,
)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (spec("no/slash"), "not allowed"),
        (spec("x" * 300), "at most 63"),
        (JobSpec(name="j", roles=[]), "no role"),
        (spec("j", role("a"), role("a")), "two roles with the same name"),
        (spec("j", role("../a")), "role name"),
        (spec("j", role("..")), "must not begin with a dot"),
        (spec("j", role("a", 3, per_group=2)), "cannot be cut into groups of 2"),
        (spec("j", role("a", -1)), "total must be at least 0"),
        (spec("j", role("a", 1, per_group=0)), "per_group at least 1"),
        (spec("j", role("a", 10**9)), "more than 100000 workers"),
        (spec("j", role("a", resources=Resources(cpu=float("nan")))), "amount of a resource"),
        (spec("j", role("a", resources=Resources(accelerator=-1))), "amount of a resource"),
        (spec("j", role("a", 2, collocation="x"), role("b", 1, collocation="x")), "same number of groups"),
        (spec("j", device_per_node=0), "device_per_node"),
        (spec("j", stop_grace_s=-1), "stop_grace_s"),
        (spec("j", labels={"a": "x" * 9000}), "characters of labels"),
        (spec("j", role(max_restart=-1)), "max_restart"),
    ],
)
def test_a_bad_job_is_refused(world: World, bad: JobSpec, text: str) -> None:
    answer = world.get(Refused, SubmitJob(spec=bad))
    assert answer.code == "bad-request"
    assert text in answer.reason
    assert world.core.cluster.jobs == {}


def test_the_same_job_from_another_host_is_joined_and_another_of_its_name_is_not(world: World) -> None:
    first = world.get(Accepted, SubmitJob(spec=spec("j", role(total=2), submitted_by="me@h0:1"), joins=True))
    assert first.submitted_by == ""
    again = world.request(SubmitJob(spec=spec("j", role(total=2), submitted_by="me@h1:2"), joins=True))
    assert again == Accepted(job_id=first.job_id, submitted_by="me@h0:1")
    assert world.get(Refused, SubmitJob(spec=spec("j", role(total=3)), joins=True)).code == "name-taken"
    assert world.get(Refused, SubmitJob(spec=spec("j", role(total=2)))).code == "name-taken"
    assert len(world.core.cluster.jobs) == 1


def test_who_joins_with_another_number_of_workers_is_refused_with_both_at_both_ends(world: World) -> None:
    first = role(total=4, per_group=2)
    world.get(Accepted, SubmitJob(spec=spec("j", first, submitted_by="me@h0:1"), joins=True))
    before = world.job("j").reason
    sizes = (role(total=2, per_group=1), "2 groups of 1 worker"), (role(total=4, per_group=1), "4 groups of 1 worker")
    for number, (second, size) in enumerate(sizes):
        other = spec("j", second, submitted_by=f"me@h1:{number}")
        sentence = (
            f"role {first.name} of me@h0:1 has 2 groups of 2 workers, and me@h1:{number} asks for {size}. The commands "
            "of one job need the same --nnodes and --nproc-per-node."
        )
        assert world.get(Refused, SubmitJob(spec=other, joins=True)).reason == f"job j-1: {sentence}"
        assert world.get(JobStatus, GetJob(job="j")).reason == f"{before}; another command is refused: {sentence}"
    other = spec("j", structs.replace(first, entry_point=EntryPoint(kind="script", target="other.py")))
    assert "has this name" in world.get(Refused, SubmitJob(spec=other, joins=True)).reason


def test_job_ids_count_up_and_names_find_the_newest(world: World) -> None:
    running(world)
    assert world.get(Refused, SubmitJob(spec=spec())).code == "name-taken"
    world.request(StopJob(job="job"))
    world.until_stage("job", Stage.STOPPED)
    assert world.request(SubmitJob(spec=spec())) == Accepted(job_id="job-2")
    assert world.job("job").job_id == "job-2"
    answer = world.get(JobStatus, GetJob(job="job-1"))
    assert (answer.stage, answer.exit_code) == (Stage.STOPPED, 130)


def test_a_job_follows_the_one_that_its_submitter_knows_of_or_is_refused(world: World) -> None:
    assert world.request(SubmitJob(spec=spec(), follows="")) == Accepted(job_id="job-1")
    assert world.get(Refused, SubmitJob(spec=spec(), follows="")).code == "name-taken"
    assert world.get(Refused, SubmitJob(spec=spec(), follows="job-1")).code == "name-taken"  # it lives
    world.request(StopJob(job="job"))
    world.until_stage("job", Stage.STOPPED)
    answer = world.get(Refused, SubmitJob(spec=spec(), follows=""))
    assert (answer.code, "job job-1 is the newest of this name, not none" in answer.reason) == ("name-taken", True)
    assert world.request(SubmitJob(spec=spec(), follows="job-1")) == Accepted(job_id="job-2")
    assert world.get(Refused, SubmitJob(spec=spec("other"), follows="job-1")).code == "name-taken"


def test_a_name_that_is_the_id_of_another_job_is_free(world: World) -> None:
    world.request(SubmitJob(spec=spec("job")))
    assert world.request(SubmitJob(spec=spec("job-1"), follows="")) == Accepted(job_id="job-1-2")


def test_a_job_keeps_named_variables_of_the_one_that_it_follows(world: World) -> None:
    secrets = {"TOKEN": "t", "OTHER": "o", "STEP": "1"}
    world.request(SubmitJob(spec=spec("job", role("a", envs=secrets), role("b", envs={"TOKEN": "b"}))))
    world.request(StopJob(job="job"))
    world.until_stage("job", Stage.STOPPED)
    again = spec("job", role("a", envs={"STEP": "2"}), role("c"))
    world.request(SubmitJob(spec=again, follows="job-1", kept_env=["TOKEN", "STEP", "GONE"]))
    roles = {each.name: each.envs for each in world.job("job").spec.roles}
    assert roles == {"a": {"TOKEN": "t", "STEP": "2"}, "c": {}}


def test_living_jobs_do_not_share_the_value_of_a_unique_label(world: World) -> None:
    def submit(name: str, labels: dict[str, str]) -> Any:
        return world.request(SubmitJob(spec=spec(name, labels=labels), unique_labels=["run"]))

    assert isinstance(submit("j1", {"run": "r", "team": "x"}), Accepted)
    answer = submit("j2", {"run": "r"})
    assert (answer.code, "job j1-1 has the label run=r" in answer.reason) == ("name-taken", True)
    assert isinstance(submit("j3", {"run": "s", "team": "x"}), Accepted)
    assert isinstance(submit("j4", {}), Accepted)
    assert isinstance(submit("j5", {}), Accepted)
    world.request(StopJob(job="j1"))
    world.until_stage("j1", Stage.STOPPED)
    assert isinstance(submit("j2", {"run": "r"}), Accepted)


def test_jobs_are_listed_by_their_labels_and_shown_with_annotations(world: World) -> None:
    world.request(SubmitJob(spec=spec("a", labels={"kind": "x", "team": "t"}, annotations={"note": "n"})))
    world.request(SubmitJob(spec=spec("b", labels={"kind": "x"})))
    world.request(SubmitJob(spec=spec("c")))

    def listed(**labels: str) -> list[str]:
        return [line.name for line in world.get(JobList, ListJobs(labels=labels)).jobs]

    assert listed() == ["a", "b", "c"]
    assert listed(kind="x") == ["a", "b"]
    assert listed(kind="x", team="t") == ["a"]
    assert listed(kind="y") == []
    assert world.get(JobList, ListJobs()).jobs[0].labels == {"kind": "x", "team": "t"}
    status = world.get(JobStatus, GetJob(job="a", annotations=True))
    assert (status.labels, status.annotations) == ({"kind": "x", "team": "t"}, {"note": "n"})
    assert world.get(JobStatus, GetJob(job="a")).annotations == {}


def test_a_line_of_the_list_says_why_a_job_failed(world: World) -> None:
    job = running(world, "job", role(max_restart=0))
    worker = job.ranks("a")[0]
    world.say("n1", world.sim_agent("n1").end(job.job_id, worker.name, USER))
    world.until_stage("job", Stage.STOPPED)
    (line,) = world.get(JobList, ListJobs()).jobs
    assert (line.exit_code, line.failure, line.started_at) == (1, USER.summary, job.started_at)


def test_a_line_of_the_list_says_that_a_save_waits_for_its_store(world: World) -> None:
    job = running(world, "job", role("trainer", 2))
    worker = job.ranks("trainer")[0]
    waits = "; a save of step 12 has waited for the store for 23 s"
    # Before its first step, what is known of an incarnation is what the one before it has reported.
    for has_stepped, waited_s, said in ((False, 23.4, ""), (True, 23.4, waits), (True, 0, "")):
        worker.has_stepped = has_stepped
        worker.progress = Progress(step=13, metrics={"loss": 2.5, "save_step": 12, "save_wait_s": waited_s})
        assert world.get(JobList, ListJobs()).jobs[0].reason == f"all workers run{said}"
    worker.progress = Progress(metrics={"save_wait_s": 23.4})
    world.request(StopJob(job="job"))
    world.until_stage("job", Stage.STOPPED)
    assert "waited" not in world.get(JobList, ListJobs()).jobs[0].reason


def test_an_unknown_job_or_worker_is_answered_with_the_nearest(world: World) -> None:
    running(world, "train", role("trainer", 2))
    answer = world.get(Refused, GetJob(job="trian"))
    assert (answer.code, answer.reason) == ("not-found", "there is no job 'trian'. Did you mean 'train'?")
    assert world.get(Refused, GetJob(job="tra")).reason == "there is no job 'tra'. Did you mean 'train-1'?"
    assert world.get(Refused, GetJob(job="zzz")).reason.endswith("`unified jobs` lists those that are known.")
    assert "Did you mean 'trainer-1'?" in world.get(Refused, ReadLog(job="train", worker="traner-1")).reason
    assert "write 'role-rank'" in world.get(Refused, Explain(job="train", worker="what")).reason
    assert world.get(Refused, RestartWorkers(job="train", workers=["store"])).code == "not-found"


def test_a_job_that_does_not_fit_now_is_refused_on_request(world: World) -> None:
    large = spec("large", role("a", 1, resources=Resources(accelerator=4)))
    answer = world.get(Refused, SubmitJob(spec=large, wait=False))
    assert answer.code == "does-not-fit"
    assert "role a needs 1 group of 4 devices; no node of this cluster has 4 (the largest, n1, has 2)" in answer.reason
    assert world.core.cluster.jobs == {}


def test_a_job_that_would_have_to_queue_does_not_fit_now(world: World) -> None:
    running(world, "first", role("a", 1, resources=Resources(accelerator=1)))
    world.request(SubmitJob(spec=spec("second", role("a", 1, resources=Resources(accelerator=2)))))
    small = spec("third", role("a", 1, resources=Resources(accelerator=1)))
    assert "second-2 came first" in world.get(Refused, SubmitJob(spec=small, wait=False)).reason


def test_without_nodes_a_job_waits_and_says_so() -> None:
    world = World()
    world.request(SubmitJob(spec=spec()))
    assert world.job("job").reason.startswith("waits: no node is alive; start an agent")
    world.add(SimAgent("n1", resources()))
    world.until_stage("job", Stage.RUNNING)


def test_where_all_nodes_are_lost_a_job_waits_and_names_them(world: World) -> None:
    """The cluster of one job starts its agents again by itself: no advice to start one."""
    world.kill_agent("n1")
    world.run(20)
    world.request(SubmitJob(spec=spec()))
    assert world.job("job").reason == "waits: no node is alive; lost: n1"


def test_a_job_larger_than_the_cluster_blocks_nobody(world: World) -> None:
    world.request(SubmitJob(spec=spec("huge", role("a", 1, resources=Resources(accelerator=4)))))
    running(world, "small", role("a", 1, resources=Resources(accelerator=1)))
    assert world.job("huge").is_waiting


def test_a_waiting_job_can_be_stopped(world: World) -> None:
    world.request(SubmitJob(spec=spec("huge", role("a", 1, resources=Resources(accelerator=4)))))
    world.request(StopJob(job="huge", reason="changed my mind"))
    job = world.job("huge")
    assert (job.stage, job.exit_code, job.reason) == (Stage.STOPPED, 130, "stopped: changed my mind")


def test_a_job_without_workers_is_done_at_once(world: World) -> None:
    world.request(SubmitJob(spec=spec("empty", role("a", 0))))
    assert (world.job("empty").stage, world.job("empty").exit_code) == (Stage.STOPPED, 0)


def test_logs_come_from_the_agent(world: World) -> None:
    running(world)
    chunk = world.get(LogChunk, ReadLog(job="job", worker="a-0"))
    assert (chunk.worker, chunk.incarnation, chunk.data) == ("a_1-0_1-0", 0, b"a_1-0_1-0#0 says hello\n")
    assert not chunk.is_final
    world.request(StopJob(job="job"))
    world.until_stage("job", Stage.STOPPED)
    last = world.get(LogChunk, ReadLog(job="job", worker="a-0"))
    assert last.is_final
    assert "its newest is 0" in world.get(Refused, ReadLog(job="job", worker="a-0", incarnation=5)).reason


def test_the_log_of_an_earlier_incarnation_is_read_where_it_was(world: World) -> None:
    running(world)
    world.request(RestartWorkers(job="job", workers=["a-0"]))
    world.run(1)
    chunk = world.get(LogChunk, ReadLog(job="job", worker="a-0", incarnation=0))
    assert (chunk.incarnation, chunk.is_final) == (0, True)


def test_a_worker_that_never_lived_has_an_empty_log(world: World) -> None:
    world.request(SubmitJob(spec=spec("huge", role("a", 1, resources=Resources(accelerator=4)))))
    chunk = world.get(LogChunk, ReadLog(job="huge", worker="a-0"))
    assert (chunk.data, chunk.is_final) == (b"", False)


def test_a_log_that_does_not_come_is_refused_in_time(world: World) -> None:
    running(world)
    world.cut.add("n1")
    number = world.ask(ReadLog(job="job", worker="a-0"))
    world.run(30)
    answer = world.answer(number)
    assert isinstance(answer, Refused)
    assert answer.code == "unavailable"
    assert "n1" in answer.reason
    assert world.get(Refused, ReadLog(job="job", worker="a-0")).code == "unavailable"


def test_a_profile_is_what_the_agent_takes_in_the_time_that_it_needs(world: World) -> None:
    running(world)
    take = ReadLog(job="job", worker="a-0", stream="profile", take="flamegraph", wait_s=100.0)
    assert world.get(LogChunk, take).worker == "a_1-0_1-0"
    world.sim_agent("n1").log_error = "py-spy is missing"
    refusal = world.get(Refused, take)
    assert (refusal.code, refusal.reason) == ("unavailable", "a_1-0_1-0 on n1 cannot be profiled: py-spy is missing.")
    world.sim_agent("n1").is_mute = True
    before = world.now
    refusal = world.get(Refused, take)
    assert "did not send a profile of a_1-0_1-0 within 1" in refusal.reason
    assert 140.0 <= world.now - before < 160.0
    number = world.ask(msgspec.structs.replace(take, wait_s=1e9))
    world.run(660)
    assert isinstance(world.answer(number), Refused), "ten minutes at most"


def test_stories_tell_what_concerns_one_worker(world: World) -> None:
    running(world, "job", role("a", 2), role("b"))
    whole = world.get(Story, Explain(job="job"))
    assert [event.event for event in whole.events][:3] == ["job-submitted", "job-placed", "worker-starts"]
    one = world.get(Story, Explain(job="job", worker="a-1"))
    assert {event.worker for event in one.events} == {"", "a_2-1_1-0"}
    short = world.get(Story, Explain(job="job", limit=1))
    assert [event.event for event in short.events] == ["job-running"]


def test_lists_show_jobs_and_what_nodes_have_left(world: World) -> None:
    running(world, "job", role("a", 1, resources=Resources(accelerator=1, cpu=3, memory_mb=100)))
    jobs = world.get(JobList, ListJobs())
    assert [(line.job_id, line.stage, line.num_workers) for line in jobs.jobs] == [("job-1", Stage.RUNNING, 1)]
    nodes = world.get(NodeList, ListNodes())
    (node,) = nodes.nodes
    assert (node.state, node.num_workers, node.free.cpu, node.free.memory_mb) == (NodeState.ALIVE, 1, 5, 15900)
    assert [device.index for device in node.free.devices] == [1]


def test_restarting_or_stopping_what_has_ended(world: World) -> None:
    running(world)
    world.request(StopJob(job="job"))
    assert world.get(Refused, RestartWorkers(job="job", workers=[])).code == "ended"
    world.until_stage("job", Stage.STOPPED)
    assert world.request(StopJob(job="job")) == Done(note="job job-1 had already ended with exit code 130.")


def register(world: World, **changes: Any) -> list[object]:
    """Register an agent of node n1 on a connection of its own; what it is answered."""
    (said,) = SimAgent("n1", resources(), incarnation="z").begin(0.0)
    message = msgspec.structs.replace(said[1], **changes)
    actions = world.core.step(world.now, Received(peer=b"x/1", request_id=1, message=message))
    return [action.message for action in actions if isinstance(action, Send) and action.peer == b"x/1"]


def test_a_node_id_on_another_host_is_refused_while_the_lease_lives(world: World) -> None:
    (answer,) = register(world, host_id="other", hostname="elsewhere")
    assert isinstance(answer, AgentRefused)
    assert answer.retry_after_s is None
    assert "node id n1 is taken by the agent on n1.local (pid 1)" in answer.reason
    world.kill_agent("n1")
    world.run(20)
    assert any(isinstance(one, DesiredWorkers) for one in register(world, host_id="other"))
    assert world.core.cluster.nodes["n1"].info.host_id == "other"


def test_an_agent_of_the_same_host_replaces_the_old_incarnation(world: World) -> None:
    assert any(isinstance(one, DesiredWorkers) for one in register(world))
    assert world.core.cluster.nodes["n1"].info.incarnation == "z"


@pytest.mark.parametrize("name", HARMFUL_NAMES)
def test_names_that_mean_harm_to_who_reads_them_are_refused(world: World, name: str) -> None:
    """Those of jobs, roles and nodes; the page shows labels and metrics of this kind as text."""
    for bad in (spec(name), spec("j", role(name))):
        answer = world.get(Refused, SubmitJob(spec=bad))
        assert answer.code == "bad-request"
        assert "at most 63" in answer.reason or "not allowed" in answer.reason
    (refusal,) = register(world, node=name)
    assert isinstance(refusal, AgentRefused)
    assert world.core.cluster.jobs == {}
    assert list(world.core.cluster.nodes) == ["n1"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"node": "../n"}, "not allowed"),
        ({"node": "n9", "resources": resources(cpu=float("inf"))}, "not a number"),
        ({"node": "n9", "resources": resources(MR=-1)}, "not a number"),
    ],
)
def test_an_agent_with_impossible_facts_is_refused(world: World, changes: dict[str, Any], text: str) -> None:
    (answer,) = register(world, **changes)
    assert isinstance(answer, AgentRefused)
    assert text in answer.reason


def test_a_lost_node_is_forgotten_after_an_hour(world: World) -> None:
    world.kill_agent("n1")
    world.run(20)
    assert world.core.cluster.nodes["n1"].state is NodeState.LOST
    world.run(3700)
    assert world.core.cluster.nodes == {}
    assert not [key for key in world.stored if key[0] == "node"]


def test_a_master_that_lost_its_memory_is_obeyed_again(world: World) -> None:
    running(world)
    world.request(RestartWorkers(job="job", workers=[]))
    world.run(1)
    world.stored.clear()
    world.log.clear()
    world.restart_master()
    world.run(5)
    agent = world.sim_agent("n1")
    assert agent.incarnations == {}
    running(world, "next")
    assert len(agent.incarnations) == 1


def test_ended_jobs_are_forgotten_in_the_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_master.core.rounds.jobs.MAX_ENDED", 2)
    for number in range(4):
        world.request(SubmitJob(spec=spec(f"j{number}", role("a", 0))))
    assert list(world.core.cluster.jobs) == ["j2-3", "j3-4"]
    assert {key for kind, key in world.stored if kind in ("job", "spec")} == {"j2-3", "j3-4"}
    assert set(world.core.cluster.events) == {"j2-3", "j3-4"}


def test_a_long_job_that_ends_last_is_known_and_none_is_half_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unified_master.core.rounds.jobs.MAX_ENDED", 2)
    running(world, "long")
    for number in range(3):
        world.request(SubmitJob(spec=spec(f"j{number}", role("a", 0))))
    world.request(StopJob(job="long"))
    world.until_stage("long", Stage.STOPPED)
    assert list(world.core.cluster.jobs) == ["long-1", "j2-4"]
    assert {key for kind, key in world.stored if kind in ("job", "spec")} == {"long-1", "j2-4"}
    monkeypatch.setattr("unified_master.core.rounds.jobs.MAX_ENDED_WEIGHT", 0)
    running(world, "longer")
    world.request(StopJob(job="longer"))
    world.until_stage("longer", Stage.STOPPED)
    world.restart_master()
    assert list(world.core.cluster.jobs) == ["longer-5"]


def test_ended_jobs_are_forgotten_when_they_weigh_too_much(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_master.core.rounds.jobs.MAX_ENDED_WEIGHT", 50)
    heavy = role("a", 0, config=Blob(codec="pickle", data=bytes(100 * 1024)))
    for number, one in enumerate([role("a", 0), role("a", 0), heavy]):
        world.request(SubmitJob(spec=spec(f"j{number}", one)))
    assert list(world.core.cluster.jobs) == ["j2-3"]
    world.request(SubmitJob(spec=spec("j3", role("a", 0))))
    assert list(world.core.cluster.jobs) == ["j3-4"]


def test_directory_of_a_job_for_clients_outside_it(world: World) -> None:
    def directory(job: str = "job", after: int = -1) -> Any:
        return world.request(GetDirectory(job=job, after_revision=after))

    world.core.cluster.relay = "tcp://10.0.0.1:9"
    world.ask(SubmitJob(spec=spec("job", role("a", 2), role("b"))))
    world.until_stage("job", Stage.RUNNING)
    found = directory()
    assert isinstance(found, JobDirectory)
    assert (found.job_id, found.relay) == ("job-1", "tcp://10.0.0.1:9")
    assert found.roles == {"a": ["a_2-0_1-0", "a_2-1_1-0"], "b": ["b_1-0_1-0"]}
    assert found.entries is not None
    assert [entry.worker for entry in found.entries] == ["a_2-0_1-0", "a_2-1_1-0", "b_1-0_1-0"]
    assert directory(after=found.revision) == msgspec.structs.replace(found, entries=None)
    refused = directory("jbo")
    assert isinstance(refused, Refused)
    assert refused.code == "not-found"
    world.ask(StopJob(job="job", force=True))
    world.until_stage("job", Stage.STOPPED)
    refused = directory()
    assert isinstance(refused, Refused)
    got = (refused.code, refused.reason)
    assert got == ("ended", "job job-1 has ended with exit code 130: nobody is there to be called.")


def test_jobs_are_listed_by_pages_and_filters(world: World) -> None:
    for number in range(5):
        world.get(Accepted, SubmitJob(spec=spec(f"j{number}", submitted_by="ann" if number % 2 else "bob")))
    world.get(Done, StopJob(job="j2"))

    def listed(**filters: Any) -> list[str]:
        return [line.name for line in world.get(JobList, ListJobs(**filters)).jobs]

    assert listed() == ["j0", "j1", "j2", "j3", "j4"]
    assert listed(limit=2) == ["j3", "j4"]
    assert listed(limit=2, before="j3") == ["j1", "j2"]
    assert listed(before="j0") == []
    assert listed(text="ann") == ["j1", "j3"]
    assert listed(text="j4") == ["j4"]
    assert listed(stages=[Stage.STOPPING, Stage.STOPPED]) == ["j2"]
    assert world.get(Refused, ListJobs(before="nobody")).code == "not-found"


def test_a_story_is_told_by_pages(world: World) -> None:
    running(world)
    everything = world.get(Story, Explain(job="job")).events
    assert len(everything) > 3
    last = world.get(Story, Explain(job="job", limit=2)).events
    rest = world.get(Story, Explain(job="job", before=last[0].sequence)).events
    assert rest + last == everything
    assert world.get(Story, Explain(job="job", before=0)).events == []
