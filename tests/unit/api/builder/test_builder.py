"""The builder's calls: what each sets, in any order, with and without `end()`."""

import copy
import re
import shlex
import sys
from datetime import timedelta
from typing import Any, assert_type

import pytest
from omegaconf import DictConfig

import unified
from unified.api.builder import DLJob, DLJobBuilder, RLJob, RLJobBuilder
from unified.errors import JobError, OptionError, UsageError
from unified.job import DLConfig, SimpleWorkloadDesc, WorkloadEntrypointType
from unified.job.workloads import WorkloadDesc


def role(builder: Any, name: str) -> WorkloadDesc:
    job = builder.build()
    assert isinstance(job, DLJob)
    return job.get_workload(name)


def refusal(builder: Any) -> str:
    with pytest.raises(JobError) as error:
        builder.build()
    return str(error.value)


def test_defaults() -> None:
    job = DLJobBuilder().train("m.f").end().build()
    assert isinstance(job, DLConfig)
    assert (job.node_num, job.device_per_node, job.device_type) == (1, 8, "GPU")
    assert (job.config, job.env, job.dl_type, job.stream_type) == ({}, {}, "SFT", "TASK_STREAM")
    assert list(job.workloads) == ["ELASTIC"]
    workload = job.get_workload("ELASTIC")
    assert (workload.total, workload.per_group, workload.resource.accelerator) == (1, 1, 1)
    assert workload.is_driver


def test_settings_of_the_job() -> None:
    builder = DLJobBuilder().dl_type("PRE").node_num(2).device_per_node(4).device_type("CPU").config({"k1": "v1"})
    job = builder.global_env({"A": "1"}).global_env({"B": 2}).as_data_stream().train("m.f").end().build()
    assert (job.node_num, job.node_number, job.device_per_node, job.device_type) == (2, 2, 4, "CPU")
    assert isinstance(job.config, DictConfig)
    assert job.config == {"k1": "v1"}
    assert job.env == {"A": "1", "B": "2"}
    assert (job.dl_type, job.stream_type) == ("PRE", "DATA_STREAM")
    assert DLJobBuilder().restart_window(timedelta(hours=1)).train("m.f").build().restart_window == 3600
    assert DLJobBuilder().as_data_stream().as_task_stream().train("m.f").build().stream_type == "TASK_STREAM"


def test_preloads_add() -> None:
    job = DLJobBuilder().preload("transformers.Trainer").preload("trl, torch", "trl").train("m.f").build()
    assert job.preload == ["transformers.Trainer", "trl", "torch"]
    assert DLJobBuilder().by_dlrover_run_cmd("torchrun train.py").preload("trl").build().preload == ["trl"]


def test_config_without_an_argument_is_empty() -> None:
    assert DLJobBuilder().config().train("m.f").build().config == {}
    assert DLJobBuilder().config("text").train("m.f").build().config == "text"


def test_roles_of_each_kind() -> None:
    builder = DLJobBuilder().role("s").run("m.s").workload("w", "m.w").role("t").train("m::t").train("m.e")
    job = builder.trainer("pkg.mod", "Trainer").build()
    assert {name: (w.backend, w.entry_point) for name, w in job.workloads.items()} == {
        "s": ("simple", "m.s"),
        "w": ("simple", "m.w"),
        "t": ("elastic", "m.t"),
        "ELASTIC": ("elastic", "m.e"),
        "TRAINER": ("simple", "pkg.mod.Trainer"),
    }


@pytest.mark.parametrize(
    "builder",
    [
        DLJobBuilder().role("r").run(("pkg.mod", "C")),
        DLJobBuilder().role("r").run("pkg.mod", "C"),
        DLJobBuilder().role("r").run(entrypoint=("pkg.mod", "C")),
        DLJobBuilder().workload("r", ("pkg.mod", "C")),
        DLJobBuilder().workload("r", "pkg.mod", "C"),
        DLJobBuilder().workload(role="r", entrypoint="pkg.mod.C"),
        DLJobBuilder().role("r").train(("pkg.mod", "C")),
        DLJobBuilder().role("r").train("pkg.mod", "C"),
        DLJobBuilder().trainer(("pkg.mod", "C")),
        DLJobBuilder().trainer(module="pkg.mod", cls="C"),
        DLJobBuilder().trainer(entrypoint="pkg.mod.C"),
    ],
)
def test_module_and_class_may_be_given_apart(builder: Any) -> None:
    (workload,) = builder.build().workloads.values()
    assert workload.entry_point == "pkg.mod.C"


def test_an_argument_with_two_names_is_given_once() -> None:
    with pytest.raises(UsageError, match=r"trainer\(\) was given module and entrypoint: give one of them"):
        DLJobBuilder().trainer("m", entrypoint="m.f")
    with pytest.raises(UsageError, match=r"trainer\(\) needs module or entrypoint"):
        DLJobBuilder().trainer()


def test_failover_of_node_groups_takes_both_names_of_its_label() -> None:
    for builder in (
        DLJobBuilder().workload("r", "m.f").enable_node_group_failover(label_key="rack", timeout=90),
        DLJobBuilder().workload("r", "m.f").enable_node_group_failover(group_label_key="rack", timeout=90),
    ):
        failover = role(builder, "r").node_group_failover
        assert (failover.enabled, failover.group_label_key, failover.timeout) == (True, "rack", 90)


def test_a_role_needs_a_name_and_only_one_description() -> None:
    with pytest.raises(ValueError, match=r"call role\(name\) before"):
        DLJobBuilder().run("m.f")
    with pytest.raises(ValueError, match="role 'a' is already defined"):
        DLJobBuilder().workload("a", "m.f").workload("a", "m.g")


def test_settings_of_a_role() -> None:
    builder = DLJobBuilder().role("r").run("m.f").total(4).per_group(2).env({"A": "1"}).envs({"B": "2"}).env(None)
    builder = builder.resource(cpu=1.5, memory=2, disk=3, accelerator=0.5, user_defined={"u": 1}).not_driver()
    builder = builder.max_restart(0).per_node_max_failure(7).rank_based_gpu_selection()
    builder = builder.enable_node_group_failover("rack", timeout=timedelta(minutes=2))
    builder = builder.sub_stage(["x"]).config({"c": 1}).disable_auto_visible_device()
    workload = role(builder, "r")
    assert isinstance(workload, SimpleWorkloadDesc)
    assert (workload.total, workload.per_group, workload.envs) == (4, 2, {"A": "1", "B": "2"})
    resource = workload.resource
    assert (resource.cpu, resource.memory, resource.disk, resource.accelerator) == (1.5, 2, 3, 0.5)
    assert resource.user_defined == {"u": 1}
    assert not workload.is_driver
    assert (workload.max_restart, workload.per_node_max_failure) == (0, 7)
    assert workload.rank_based_gpu_selection
    assert workload.config == {"c": 1}
    assert builder.build().config == {}, "the job's own was not said"
    assert workload.node_group_failover.enabled
    assert (workload.node_group_failover.group_label_key, workload.node_group_failover.timeout) == ("rack", 120)
    assert workload.sub_stage == ["x"]
    assert not workload.auto_visible_devices


def test_environment_of_the_job_and_of_roles_are_kept_apart() -> None:
    job = DLJobBuilder().global_env({"A": "job"}).train("m.f").env({"A": "role"}).build()
    assert job.env == {"A": "job"}
    assert job.get_workload("ELASTIC").envs == {"A": "role"}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda r: r, (0, 0, 0, 1)),
        (lambda r: r.resource(), (0, 0, 0, 1)),
        (lambda r: r.resource(cpu=4, mem=8192), (4, 8192, 0, 0)),
        (lambda r: r.resource(gpu=2), (0, 0, 0, 2)),
        (lambda r: r.resource(acc=0.5), (0, 0, 0, 0.5)),
        (lambda r: r.resource({"cpu": 1, "gpu": 1}), (1, 0, 0, 1)),
        (lambda r: r.resource({"cpu": 1}, disk=5), (1, 0, 5, 0)),
        (lambda r: r.resource(cpu=4, mem=10).resource(gpu=1), (0, 0, 0, 1)),
    ],
)
def test_resources_in_all_their_forms(make: Any, expected: tuple[float, ...]) -> None:
    found = role(make(DLJobBuilder().role("r").run("m.f")), "r").resource
    assert (found.cpu, found.memory, found.disk, found.accelerator) == expected


def r() -> Any:
    return DLJobBuilder().role("r").run("m.f")


R, FAILOVER = "role 'r': ", "role 'r': node_group_failover"
ROLE_A = DLJobBuilder().workload("a", "m.a")
THREE = DLJobBuilder().workload("a", "m.a").workload("b", "m.b").workload("c", "m.c")


@pytest.mark.parametrize(
    ("builder", "said"),
    [
        (DLJobBuilder().node_num(1), ["at least one workload must be defined"]),
        (r().total(0), ["the job has no workers"]),
        (r().end().device_type("mem"), ["device_type is 'mem'"]),
        (r().end().node_num(0), ["node_num is 0"]),
        (r().end().device_per_node(0), ["device_per_node"]),
        (r().end().dl_type("sft2"), ["dl_type"]),
        (r().end().global_env("A=1"), ["global_env is"]),
        (r().end().config({"a": "${b}"}), ["config: the config cannot be resolved"]),
        (r().resource(gpuu=1).end(), [f"{R}resource", "'gpuu'", "Did you mean 'gpu'?"]),
        (r().resource(memory=1, mem=1).end(), [f"{R}resource", "two names of one field"]),
        (r().resource({"cpux": 1}).end(), [f"{R}resource", "Did you mean 'cpu'?"]),
        (r().resource(cpu=-1).end(), [f"{R}resource.cpu"]),
        (r().total(-1).end(), [f"{R}total"]),
        (r().total(3).per_group(2).end(), [R, "total=3 is not divisible by per_group=2"]),
        (r().env("A=1").end(), [f"{R}env is"]),
        (r().env({"A": object()}).end(), [f"{R}env.A"]),
        (r().enable_node_group_failover("rack", 30).end(), [f"{FAILOVER}.timeout", "60"]),
        (r().enable_node_group_failover("").end(), [f"{FAILOVER}.group_label_key"]),
        (r().rank_based_gpu_selection().end(), [R, "rank_based_gpu_selection needs per_group"]),
        (DLJobBuilder().role("r").run("nothing").end(), [f"{R}entry_point"]),
        (DLJobBuilder().train("").end(), ["entry_point"]),
        (DLJobBuilder().train("m.f").nnodes("8:2").end(), ["role 'ELASTIC': "]),
        (DLJobBuilder().train("m.f").nnodes(0).end(), ["nnodes=0"]),
        # every mistake is told at once
        (r().role("b").run("nothing").role("c").run("m.f").total(-1).end(),
         ["role 'b': entry_point", "role 'c': total"]),
        (ROLE_A.with_collocation_all("cc"), ["'cc'"]),
        (DLJobBuilder().preload("trl", "a-b").train("m.f").end(), ["preload: 'a-b' is no name of a module to preload"]),
        (DLJobBuilder().preload("a..b").train("m.f").end(), ["preload: 'a..b' is no name of a module to preload"]),
        (DLJobBuilder().preload("").train("m.f").end(), ["preload: '' is no name of a module to preload"]),
        (THREE.with_collocation("a", "b").with_collocation("b", "c"), ["already been assigned"]),
        (DLJobBuilder().workload("rollout", "m.a").with_collocation("rollout", "rolout2"),
         ["'rolout2' is named in a collocation, and is not defined. Did you mean 'rollout'?"]),
    ],
)  # fmt: skip
def test_refusals_name_the_role_and_the_field(builder: Any, said: list[str]) -> None:
    text = refusal(builder)
    for part in said:
        assert part in text


def train() -> Any:
    return DLJobBuilder().node_num(8).train("m.f")


@pytest.mark.parametrize(
    ("builder", "expected"),
    [
        # nodes and workers a node in either order
        (train().nnodes(2).nproc_per_node(4), {"total": 8, "per_group": 4}),
        (train().nproc_per_node(4).nnodes(2), {"total": 8, "per_group": 4}),
        (train().nnodes(3), {"total": 3, "per_group": 1}),
        (train().nproc_per_node(3), {"total": 3, "per_group": 3}),
        (train().total(4).nproc_per_node(2), {"total": 4, "per_group": 2}),
        (train().total(4).per_group(2), {"total": 4, "per_group": 2}),
        (train().nnodes(3).nproc_per_node(1).total(4), {"total": 4, "per_group": 1}),
        (train().nproc_per_node(1).per_group(2).nnodes(2), {"total": 4, "per_group": 2}),
        (train().nnodes("2:4").nproc_per_node(2), {"total": 8, "per_group": 2}),
        (train().nproc_per_node(2).nnodes("2:4"), {"total": 8, "per_group": 2}),
        (train().nnodes("2:8"), {"min_nodes": 2, "max_nodes": 8}),
        (r().total(0).train("m.f"), {"total": 0}),
        (train().communication("gloo", timedelta(seconds=30)), {"comm_backend": "gloo", "comm_timeout_s": 30}),
        (train().disable_ray_auto_visible_device(), {"auto_visible_devices": False}),  # upstream's name
        (train(), {"comm_auto_setup_process_group": True, "comm_pre_check": True}),
        (train().no_setup_process_group(), {"comm_auto_setup_process_group": False, "comm_pre_check": True}),
        (DLJobBuilder().no_setup_process_group().skip_node_check().train("m.f").role("s").run("m.g"),
         {"comm_auto_setup_process_group": False, "comm_pre_check": False}),
        (DLJobBuilder().train("train.py --x 'a b'"), {"entry_point": "train.py --x 'a b'"}),
    ],
)  # fmt: skip
def test_what_calls_set(builder: Any, expected: dict[str, object]) -> None:
    workload = next(iter(builder.build().workloads.values()))
    assert {name: getattr(workload, name) for name in expected} == expected


def test_chains_go_on_without_end() -> None:
    job = DLJobBuilder().role("a").run("m.a").total(2).role("b").run("m.b").node_num(2).config({"x": 1}).build()
    assert {name: workload.total for name, workload in job.workloads.items()} == {"a": 2, "b": 1}
    assert (job.node_num, job.config) == (2, {"x": 1})


def test_end_gives_the_job_builder() -> None:
    builder = DLJobBuilder()
    assert builder.role("a").run("m.a").end() is builder


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: DLJobBuilder().train("m.f").nproc_per_nod(2), "Did you mean 'nproc_per_node'?"),
        (lambda: DLJobBuilder().train("m.f").divice_type("CPU"), "Did you mean 'device_type'?"),
        (lambda: DLJobBuilder().role("r").run("m.f").nnodes(2), "'nnodes'"),
        (lambda: DLJobBuilder().node_nums(2), "Did you mean 'node_num'?"),
        (lambda: DLJobBuilder().total(2), "it is said of a role"),
        (lambda: DLJobBuilder().submit("j"), "Call build() first"),
        (lambda: DLJobBuilder().train("m.f").submit("j"), "Call build() first"),
        (lambda: unified.local_clusters(), "Did you mean 'local_cluster'?"),
    ],
)
def test_unknown_methods_name_the_nearest(make: Any, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AttributeError, match=re.escape(said)) as caught:
        make()
    sys.__excepthook__(AttributeError, caught.value.with_traceback(None), None)
    assert capsys.readouterr().err.count("Did you mean") == said.count("Did you mean"), "Python adds its own hint"


def test_builders_can_be_copied_and_asked() -> None:
    builder = DLJobBuilder().role("a").run("m.a").total(2)
    twin = copy.deepcopy(builder).total(4)
    assert role(builder, "a").total == 2
    assert role(twin, "a").total == 4
    assert not hasattr(builder, "_repr_html_")


def test_building_twice_gives_equal_jobs() -> None:
    builder = DLJobBuilder().role("a").run("m.a").role("b").run("m.b").with_collocation("a", "b")
    assert builder.build() == builder.build()


def test_collocation_by_name() -> None:
    builder: Any = DLJobBuilder().node_num(2).device_per_node(4)
    for name in ("actor", "rollout", "ref"):
        builder = builder.role(name).run("m.f").total(4).per_group(4)
    job = builder.with_collocation("actor", "rollout", "ref").build()
    assert job.collocations == [{"actor", "rollout", "ref"}]
    assert {w.resource.accelerator for w in job.workloads.values()} == {0.33}
    assert len({w.group for w in job.workloads.values()}) == 1


def test_collocation_of_all() -> None:
    builder = DLJobBuilder().with_collocation_all("c").workload("a", "m.a").workload("b", "m.b")
    job = builder.workload("c", "m.c").build()
    assert job.collocations == [{"a", "b"}]
    assert job.get_workload("c").group is None


def test_a_job_answers_for_its_roles() -> None:
    job = DLJobBuilder().workload("rollout", "m.a").build()
    with pytest.raises(KeyError, match="Did you mean 'rollout'"):
        job.get_workload("rolout")


def test_usage_errors_are_value_errors() -> None:
    assert issubclass(UsageError, ValueError)
    assert issubclass(JobError, ValueError)


def test_an_error_is_a_job_error_and_no_block_of_pydantics() -> None:
    said = refusal(r().total("many").end().node_num(0))
    assert said.split("\n") == [
        "role 'r': total is 'many': it must be a valid integer, unable to parse string as an integer.",
        "node_num is 0: it must be greater than or equal to 1.",
    ]


def test_type_checkers_know_the_job_at_the_end_of_a_chain() -> None:
    """`make types` runs mypy over this file: an ignored error that is none fails there."""
    chain = DLJobBuilder().node_num(1).role("a").run("m.a").resource(cpu=1).role("b").run("m.b").resource(cpu=1)
    job = assert_type(chain.workload("c", "m.c").resource(cpu=1).train("m.d").build(), DLJob)
    assert list(job.workloads) == ["a", "b", "c", "ELASTIC"]
    assert_type(RLJobBuilder().actor("m.a").build(), RLJob)
    with pytest.raises(OptionError):
        job.submit(job_max_restrt=3)  # type: ignore[call-overload]


def test_a_role_of_a_cpu_job_takes_no_device_unless_it_asks() -> None:
    builder: Any = DLJobBuilder().device_type("CPU").device_per_node(1).workload("a", "m.a").total(6)
    builder = builder.workload("b", "m.b").resource(mem=5).workload("c", "m.c").resource(gpu=1)
    job = builder.train("m.t").nproc_per_node(4).build()
    assert {name: job.get_workload(name).resource.accelerator for name in job.workloads} == {
        "a": 0, "b": 0, "c": 1, "ELASTIC": 0,
    }  # fmt: skip
    assert job.get_workload("b").resource.memory == 5
    assert DLJob.model_validate(job.model_dump()) == job


def test_too_few_accelerators_name_the_remedy() -> None:
    assert ".resource(cpu=1)" in refusal(DLJobBuilder().device_per_node(1).workload("a", "m.a").total(6).end())
    assert ".resource(cpu=1)" in refusal(DLJobBuilder().device_per_node(1).train("m.t").nproc_per_node(2).end())


@pytest.mark.parametrize("builder", [DLJobBuilder(), RLJobBuilder()])
def test_functions_are_entry_points_at_every_door(builder: Any) -> None:
    def run() -> None:
        pass

    made = builder.workload("a", run).trainer(run).role("b").train(shlex.join).end()
    roles = made.description()["workloads"]
    assert roles["a"]["entry_point"] is roles["TRAINER"]["entry_point"] is run
    job = DLJob.model_validate(made.description())
    assert (job.get_workload("a").entry_point, job.get_workload("b").entry_point) == (run, "shlex.join")
    assert job.get_workload("a").entry_point_type is WorkloadEntrypointType.MODULE_FUNC
    assert "test_functions_are_entry_points_at_every_door.<locals>.run" in job.model_dump_json()


def test_a_rank_that_submits_a_job_is_told_to_start_its_script_by_python(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`unified run submit.py` runs a driver in each rank. A rank 0 may want to submit a job, such as an evaluation."""
    submitted: list[Any] = []
    monkeypatch.setattr("unified.client.submission.submit_job", lambda spec, **_: submitted.append(spec.name))
    monkeypatch.setattr(sys, "argv", ["/some/submit.py"])
    job = DLJobBuilder().train("m.f").build()
    job.submit("a", blocking=False)
    for name, value in {"UNIFIED_JOB_ID": "outer-1", "TORCHELASTIC_RUN_ID": "none", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    job.submit("b", blocking=False)
    said = "rank 0 of job outer-1, and each rank that calls it submits a job. Start a script that only submits a job "
    assert f"{said}with `python submit.py`, not with `unified run submit.py`." in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UsageError, match=re.escape("with `python submit.py`")):
        job.submit("c", blocking=False)
    assert submitted == ["a", "b"]
