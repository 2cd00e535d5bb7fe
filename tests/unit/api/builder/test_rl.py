"""The builder of reinforcement learning jobs."""

from typing import Any

import pytest

from unified.api.builder import RLJobBuilder
from unified.api.builder.rl import RLJob
from unified.errors import JobError


def whole_job() -> Any:
    builder = RLJobBuilder().node_num(3).device_per_node(8).config({"k1": "v1"}).global_env({"e0": "v0"})
    builder.trainer("m0.c0").end().actor("m1.c1").total(4).per_group(2).env({"e1": "v1"}).end()
    builder.rollout("m2.c2").total(4).per_group(2).end().reward("m3.c3").total(4).per_group(2).end()
    return builder.reference("m4.c4").total(4).per_group(2).end().critic("m5.c5").total(4).per_group(2).end()


def test_roles_and_what_suits_them() -> None:
    job = whole_job().build()
    assert isinstance(job, RLJob)
    found = {name: (w.backend, w.is_driver, w.entry_point) for name, w in job.workloads.items()}
    assert found == {
        "TRAINER": ("simple", True, "m0.c0"),
        "ACTOR": ("elastic", False, "m1.c1"),
        "ROLLOUT": ("simple", False, "m2.c2"),
        "REWARD": ("simple", False, "m3.c3"),
        "REFERENCE": ("simple", False, "m4.c4"),
        "CRITIC": ("elastic", False, "m5.c5"),
    }
    trainer = job.get_workload("TRAINER")
    assert (trainer.resource.cpu, trainer.resource.memory, trainer.resource.accelerator) == (4, 8192, 0)
    assert (trainer.total, trainer.per_group) == (1, 1)
    assert job.get_workload("ACTOR").envs == {"e1": "v1"}
    assert (job.stream_type, job.dl_type) == ("TASK_STREAM", "RL")


def test_collocation_takes_either_case() -> None:
    for names in (("ACTOR", "ROLLOUT"), ("actor", "rollout"), ("Actor", "ROLLOUT")):
        job = whole_job().with_collocation(*names).build()
        assert job.collocations == [{"ACTOR", "ROLLOUT"}]
        assert job.get_workload("ACTOR").resource.accelerator == 0.5


def test_collocation_of_all_leaves_the_trainer_out() -> None:
    job = whole_job().with_collocation_all().build()
    assert job.collocations == [{"ACTOR", "ROLLOUT", "REWARD", "REFERENCE", "CRITIC"}]
    assert job.get_workload("TRAINER").group is None
    assert job.get_workload("ACTOR").resource.accelerator == 0.2
    without_trainer = RLJobBuilder().actor("m.a").rollout("m.r").with_collocation_all().build()
    assert without_trainer.collocations == [{"ACTOR", "ROLLOUT"}]


def test_a_smallest_job() -> None:
    job = RLJobBuilder().node_num(1).device_per_node(1).config({"k1": "v1"}).trainer("m0.c0").actor("m1.c1").build()
    assert set(job.workloads) == {"TRAINER", "ACTOR"}


def test_roles_may_be_given_as_module_and_class() -> None:
    for builder in (
        RLJobBuilder().trainer("m", "T").actor("m", "A").rollout("m", "R").critic("m", "C").reward("m", "W"),
        RLJobBuilder().trainer(("m", "T")).actor(("m", "A")).rollout(("m", "R")).critic(("m", "C")).reward(("m", "W")),
        RLJobBuilder().trainer(entrypoint="m.T").actor(entrypoint="m.A").rollout("m.R").critic("m.C").reward("m.W"),
    ):
        job = builder.reference("m", "F").build()
        assert [workload.entry_point for workload in job.workloads.values()] == [
            *("m.T", "m.A", "m.R", "m.C", "m.W", "m.F")
        ]


@pytest.mark.parametrize(
    ("builder", "said"),
    [
        (RLJobBuilder().trainer("m.t").end(), "'actor' must be configured"),
        (RLJobBuilder().actor("m.a").as_data_stream(), "task stream"),
        (RLJobBuilder().actor("m.a").workload("ROLOUT", "m.r").end(), "Did you mean 'ROLLOUT'?"),
        (RLJobBuilder().actor("m.a").workload("actor", "m.r").end(), "role 'actor' is unknown"),
        (RLJobBuilder().trainer("").actor("m.a").end(), "role 'TRAINER': entry_point"),
        (RLJobBuilder().node_num(1), "at least one workload"),
        (RLJobBuilder().trainer("m.t").actor("m.a").with_collocation("ACTOR", "ROLLOUT"), "not defined"),
        (whole_job().with_collocation("ACTOR", "ROLLOUT").with_collocation("ACTOR", "REWARD"), "already been assigned"),
    ],
)
def test_jobs_that_cannot_be(builder: Any, said: str) -> None:
    with pytest.raises(JobError) as error:
        builder.build()
    assert said in str(error.value)


def test_groups_of_different_sizes_may_be_collocated() -> None:
    builder: Any = RLJobBuilder().node_num(2).device_per_node(6).trainer("m0.c0")
    builder = builder.actor("m1.c1").total(4).per_group(2).rollout("m2.c2").total(4).per_group(2)
    builder = builder.reference("m3.c3").total(12).per_group(6).reward("m4.c4").total(4).per_group(2)
    job = builder.with_collocation("ACTOR", "ROLLOUT").with_collocation("REWARD", "REFERENCE").build()
    assert job.get_workload("ACTOR").group == job.get_workload("ROLLOUT").group
    assert job.get_workload("REWARD").group == job.get_workload("REFERENCE").group
    assert job.get_workload("REFERENCE").resource.accelerator == 0.5
