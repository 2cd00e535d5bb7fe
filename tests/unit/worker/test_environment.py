"""Variables and module path of a worker."""

import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.runtime import ENTRY, launch_of
from unified.errors import EntryPointError
from unified.job.spec import Communication, EntryPoint, JobSpec, RoleSpec
from unified.protocol.agent_master import RunOrder
from unified.protocol.worker_agent import Launch
from unified.worker import environment

AS_TORCHRUN_SCRIPT: dict[str, Any] = {
    "entry_point": EntryPoint(kind="script", target="t.py"),
    "communication": Communication(auto_setup=False),
}


def launch(*, role: dict[str, Any] | None = None, spec: dict[str, Any] | None = None, **changes: Any) -> Launch:
    trainer: dict[str, Any] = {"name": "trainer", "kind": "elastic", "entry_point": ENTRY, "total": 4, "per_group": 2}
    job = JobSpec(name="job", roles=[RoleSpec(**{**trainer, **(role or {})})], **(spec or {}))
    return launch_of(job, 3, **{"incarnation": 1, **changes})


@pytest.mark.parametrize(
    ("role", "is_left"),
    [
        ({}, True),
        ({"entry_point": EntryPoint(kind="script", target="t.py")}, True),
        (AS_TORCHRUN_SCRIPT, False),
        ({**AS_TORCHRUN_SCRIPT, "entry_point": EntryPoint(kind="program", target="t")}, False),
        ({**AS_TORCHRUN_SCRIPT, "envs": {"ACCELERATE_TORCH_DEVICE": "cuda:1"}}, True),
    ],
)
def test_device_is_what_the_agent_says(role: dict[str, Any], is_left: bool) -> None:
    """A program of torchrun's does not see it: accelerate would prefer it to its own options."""
    environ = {"ACCELERATE_TORCH_DEVICE": "cuda:1"}
    assert environment.take_device(launch(role=role), environ) == "cuda:1"
    assert bool(environ) == is_left
    assert environment.take_device(launch(role=role), {}) == "cpu"


def test_identity_variables() -> None:
    assert environment.identity(launch()) == {
        "JOB": "job",
        "NAME": "trainer_4-3_2-1",
        "ROLE": "trainer",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "UNIFIED_JOB_ID": "job-1",
        "UNIFIED_NODE": "n1",
        "UNIFIED_INCARNATION": "1",
        "UNIFIED_MASTER": "tcp://127.0.0.1:7077",
    }


def test_the_users_settings_win_over_the_nodes_and_identity_over_both() -> None:
    envs = {"OMP_NUM_THREADS": "1", "RANK": "7", "MINE": "m"}
    given = launch(env={"OMP_NUM_THREADS": "4", "RES_OPTIONS": "x"}, role={"envs": envs})
    variables = environment.variables(given)
    assert (variables["OMP_NUM_THREADS"], variables["RES_OPTIONS"], variables["MINE"]) == ("1", "x", "m")
    assert variables["RANK"] == "3"


def test_a_store_host_has_what_the_node_says_and_no_role() -> None:
    store = msgspec.structs.replace(launch(kind="store", name="store", env={"RES_OPTIONS": "x"}), role="")
    assert environment.variables(store) == {"RES_OPTIONS": "x"}


def test_elastic_variables_are_those_of_torchrun() -> None:
    given = launch()
    order = RunOrder(round=2, rank=1, world_size=2, node_rank=1, store_host="10.0.0.1", store_port=9)
    variables = environment.elastic(given, given.spec.role("trainer"), order, 4711)
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.1", "4711")
    assert (variables["RANK"], variables["WORLD_SIZE"], variables["LOCAL_RANK"]) == ("1", "2", "1")
    assert (variables["TORCHELASTIC_USE_AGENT_STORE"], variables["TORCHELASTIC_RESTART_COUNT"]) == ("True", "1")
    assert (variables["GROUP_RANK"], variables["NODE_RANK"]) == ("1", "1")


def test_working_directory(tmp_path: Path) -> None:
    own = launch(spec={"working_dir": str(tmp_path)})
    assert environment.working_directory(own, {}) == tmp_path
    assert environment.working_directory(own, {"DLROVER_WORKING_DIR": "/"}) == Path("/")
    assert environment.working_directory(launch(), {}) is None
    for given, environ in ((own, {"DLROVER_WORKING_DIR": "/no/such"}), (launch(spec={"working_dir": "/no/such"}), {})):
        with pytest.raises(EntryPointError, match=r"node n1 has no working directory /no/such: .*working_dir="):
            environment.working_directory(given, environ)


def test_module_path_is_the_drivers_with_nothing_twice(tmp_path: Path) -> None:
    script, work = tmp_path / "script", tmp_path / "work"
    script.mkdir()
    work.mkdir()
    given = launch(
        spec={"sys_path": [str(script), "/no/such", str(work)]},
        role={"envs": {"PYTHONPATH": os.pathsep.join(["/opt/a", str(script), "/usr", ""])}},
    )
    entries = environment.new_path_entries(given, work, ["/usr", str(work)], {})
    assert entries == [str(script), str(work), "/opt/a"]


def test_a_working_directory_of_others_is_named_with_the_user_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "chdir", refuse)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(EntryPointError, match=r"node n1: the worker runs as \w+, which cannot enter .*--ship"):
        environment.apply(launch(spec={"working_dir": str(tmp_path)}))


def test_a_working_directory_that_was_chosen_comes_first_on_the_module_path(tmp_path: Path) -> None:
    script, work, other = (str(tmp_path / name) for name in ("script", "work", "other"))
    for folder in (script, work, other):
        Path(folder).mkdir()
    given = launch(spec={"sys_path": [script, work]})

    def entries(directory: str, chosen: str) -> list[str]:
        return environment.new_path_entries(given, Path(directory), [], {"DLROVER_WORKING_DIR": chosen})

    assert entries(work, chosen=work) == [work, script]
    assert entries(other, chosen=other) == [other, script, work]
    assert entries(other, chosen="") == [other, script, work]
    assert entries(work, chosen="/no/such") == [script, work]


@pytest.mark.parametrize(("given", "expected"), [("7", 7), ("4,2", 4), ("", None), ("0", None), ("many", None)])
def test_threads(given: str, expected: int | None) -> None:
    cores = len(os.sched_getaffinity(0))
    assert environment.thread_count({"OMP_NUM_THREADS": given}) == (expected or cores)


SCRIPT = EntryPoint(kind="script", target="train.py")


def test_a_script_s_path_has_neither_the_driver_s_folders_in_front_nor_the_working_directory(tmp_path: Path) -> None:
    driver, work = str(tmp_path / "driver"), str(tmp_path / "work")
    for folder in (driver, work):
        Path(folder).mkdir()
    given = launch(spec={"sys_path": [driver, work]}, role={"entry_point": SCRIPT, "envs": {"PYTHONPATH": "/opt/a"}})
    assert environment.new_path_entries(given, Path(work), ["/usr"], {}) == ["/opt/a"]
    assert environment.new_path_entries(given, Path(work), ["/usr"], {"DLROVER_WORKING_DIR": work}) == [work, "/opt/a"]
    assert environment.last_path_entries(given, ["/usr", work]) == [driver]
    assert environment.last_path_entries(launch(spec={"sys_path": [driver]}), []) == []


def test_a_script_s_own_name_role_and_job_are_not_overwritten() -> None:
    users = {"NAME": "mine", "RANK": "9"}
    variables = environment.variables(launch(role={"entry_point": SCRIPT, "envs": users}), {"ROLE": "theirs"})
    found = {name: variables.get(name) for name in ("NAME", "ROLE", "JOB", "RANK")}
    assert found == {"NAME": "mine", "ROLE": None, "JOB": "job", "RANK": "3"}
    assert environment.variables(launch(role={"envs": users}), {"ROLE": "theirs"})["NAME"] == "trainer_4-3_2-1"


def test_a_launcher_s_run_id_limit_and_error_file_reach_the_ranks() -> None:
    communication = Communication(run_id="exp7")
    given = launch(role={"communication": communication, "role_max_restart": 6}, log_file="/logs/job-1/w/1.err")
    order = RunOrder(round=2, rank=1, world_size=2)
    variables = environment.elastic(given, given.spec.role("trainer"), order, 4711)
    assert (variables["TORCHELASTIC_RUN_ID"], variables["TORCHELASTIC_MAX_RESTARTS"]) == ("exp7", "6")
    assert variables["TORCHELASTIC_ERROR_FILE"] == "/logs/job-1/w/1.error.json"
    plain = launch()
    assert environment.elastic(plain, plain.spec.role("trainer"), order, 1)["TORCHELASTIC_RUN_ID"] == "job-1"


def test_ports_stand_in_the_values_and_in_the_arguments() -> None:
    entry = EntryPoint(kind="script", target="serve-{port}.py", argv=["--port={port}", "{port1}", "{ports}"])
    given = launch(
        role={"entry_point": entry, "envs": {"URL": "http://h:{port1}", "{port}": "{}"}}, ports=[20100, 20200]
    )
    found = environment.variables(given)
    assert (found["URL"], found["{port}"]) == ("http://h:20200", "{}")
    assert environment.entry_point(given) == msgspec.structs.replace(entry, argv=["--port=20100", "20200", "{ports}"])
    assert given.spec.role("trainer").entry_point == entry, "the description is as the user wrote it"
