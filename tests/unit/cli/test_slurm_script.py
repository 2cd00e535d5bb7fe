"""The sbatch script of a job: what is derived, what is given, and what contradicts it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from unified.cli.main import main
from unified.errors import UsageError
from unified.job.spec import EntryPoint, JobSpec, Resources, RoleSpec, in_groups
from unified.slurm import Slurm, batch, commands
from unified.slurm.allocation import NodeOptions, SlurmAllocation, agent_arguments, agent_environment

ENTRY = EntryPoint(kind="attribute", target="train", attribute="run")
UNIFIED = ["/venv/bin/python", "-P", "-m", "unified"]
EXAMPLE = Path(__file__).parents[3] / "deploy/slurm/train.sbatch"


def a_role(name: str = "trainer", total: int = 8, per_group: int = 2, **more: object) -> RoleSpec:
    given: dict[str, object] = {"resources": Resources(cpu=3, memory_mb=1000.5, accelerator=1), **more}
    return RoleSpec(name=name, kind="elastic", entry_point=ENTRY, total=total, per_group=per_group, **given)  # type: ignore[arg-type]


def a_job(*roles: RoleSpec, **more: object) -> JobSpec:
    given: dict[str, object] = {"node_num": 4, "device_per_node": 2, **more}
    return JobSpec(name="sft", roles=list(roles or [a_role()]), **given)  # type: ignore[arg-type]


def lines(spec: JobSpec, slurm: Slurm | None = None) -> list[str]:
    slurm = slurm or Slurm()
    return batch.script(spec.name, batch.demand(spec, slurm), slurm, UNIFIED, ["driver", "a b"]).splitlines()


def test_nodes_gpus_cpus_and_memory_come_from_the_job() -> None:
    text = lines(a_job())
    assert text[0] == "#!/bin/bash"
    for option in ("--nodes=4", "--gpus-per-node=2", "--cpus-per-task=6", "--mem=2001M", "--signal=B:USR1@190"):
        assert f"#SBATCH {option}" in text
    assert text[-1] == "exec /venv/bin/python -P -m unified slurm exec --nodes=4 -- driver 'a b'"


def test_a_job_of_type_cpu_has_virtual_devices_and_no_gpus() -> None:
    text = lines(a_job(accelerator_type="CPU"))
    assert not any("gpus" in line for line in text)
    assert "--devices=2" in text[-1]
    assert "--devices=5" in lines(a_job(), Slurm(devices=5))[-1]


def test_without_amounts_each_worker_has_one_cpu() -> None:
    text = lines(a_job(a_role(resources=Resources(accelerator=1))))
    assert "#SBATCH --cpus-per-task=2" in text
    assert not any("--mem" in line for line in text)


def test_a_range_of_nodes_and_nodes_in_reserve() -> None:
    spec = a_job(a_role(total=10, min_nodes=2, max_nodes=5), node_num=5)
    text = lines(spec, Slurm(spare_nodes=1, requeues=3, time="2-0", array="0-9"))
    assert "#SBATCH --nodes=3-6" in text
    assert "#SBATCH --output=%x-%A_%a.out" in text
    assert "exec --nodes=2-5 --requeues=3 -- " in text[-1], "nodes beyond the range alone are in reserve"


@pytest.mark.parametrize("given", [["--mem=9G"], ["--mem", "9G"]])
def test_an_option_that_is_given_wins(given: list[str]) -> None:
    text = lines(a_job(), Slurm(sbatch=[*given, "-J", "mine"]))
    assert not any("2001M" in line or "job-name" in line for line in text)
    assert f"#SBATCH {' '.join(given)} -J mine" in text


@pytest.mark.parametrize("given", ["-N3", "-N 3", "--nodes=3", "--nodes=1-3"])
def test_too_few_nodes_are_refused_and_more_are_in_reserve(given: str) -> None:
    with pytest.raises(UsageError, match=r"--nodes=.*3 is too few: the job needs 4 nodes\. Leave the option out"):
        lines(a_job(), Slurm(sbatch=[given]))
    with pytest.raises(UsageError, match="needs 4 nodes and 1 in reserve"):
        lines(a_job(), Slurm(sbatch=["--nodes=4"], spare_nodes=1))
    assert "#SBATCH --nodes=9" in lines(a_job(), Slurm(sbatch=["--nodes=9"]))
    assert "--nodes=4 --" in lines(a_job(), Slurm(sbatch=["--nodes=9"]))[-1]


def test_groups_are_components_of_a_heterogeneous_job() -> None:
    spec = a_job(a_role(total=4), a_role("env", total=6, per_group=1), a_role("judge", total=1, per_group=1))
    text = lines(spec, Slurm(groups={"env": ["-p", "cpu", "-N", "2"], "judge": []}))
    at = text.index("#SBATCH hetjob")
    assert text[at + 1] == "#SBATCH --ntasks-per-node=1 -p cpu -N 2"
    assert text[at + 2 : at + 4] == ["#SBATCH hetjob", "#SBATCH --ntasks-per-node=1 --nodes=1"]
    assert "#SBATCH --nodes=1" in text[:at]
    assert text[-2] == """export UNIFIED_SLURM_GROUPS='{"env": 1, "judge": 2}'"""
    with pytest.raises(UsageError, match=r"no role 'envs' to be put into a group\. Did you mean 'env'"):
        lines(spec, Slurm(groups={"envs": []}))
    placed = in_groups(spec, {"env": 1})
    assert [list(role.resources.user_defined) for role in placed.roles] == [
        ["slurm_het_group_0"],
        ["slurm_het_group_1"],
        ["slurm_het_group_0"],
    ]


@pytest.mark.parametrize("limit", ["3", "4:09", "0:4:0", "0-0:4"])
def test_a_time_limit_that_leaves_no_time_is_refused(limit: str) -> None:
    message = rf"the time limit {limit} is too short: 190 to 250 s before its end"
    with pytest.raises(UsageError, match=message):
        lines(a_job(), Slurm(time=limit))
    with pytest.raises(UsageError, match=message):
        lines(a_job(), Slurm(sbatch=["-t", limit]))
    assert "#SBATCH --signal=B:USR1@30" in lines(a_job(), Slurm(time=limit, sbatch=["--signal=B:USR1@30"]))


@pytest.mark.parametrize("limit", ["5", "4:10", "1:0:0", "1-0", "UNLIMITED", "soon", ""])
def test_other_time_limits_are_left_to_sbatch(limit: str) -> None:
    lines(a_job(), Slurm(time=limit))


def test_the_example_is_what_is_printed() -> None:
    spec = a_job(
        a_role(total=16, per_group=8, resources=Resources(cpu=8, accelerator=1)), node_num=2, device_per_node=8
    )
    slurm = Slurm(time="12:00:00", partition="gpu", spare_nodes=1)
    driver = ["unified", "submit", "submit.py", "--no-wait", "--name", "sft"]
    assert EXAMPLE.read_text() == batch.script("sft", batch.demand(spec, slurm), slurm, ["unified"], driver)


def test_an_array_of_agents() -> None:
    text = batch.grow_script(4, Slurm(time="2:00:00"), UNIFIED, ["--master", "tcp://a:1"], "/home/me/cluster.key")
    assert "#SBATCH --array=0-3" in text
    assert text.endswith("exec /venv/bin/python -P -m unified slurm agent --master tcp://a:1 < /home/me/cluster.key\n")


ENV = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURMD_NODENAME": "n3",
    "SLURM_NODEID": "2",
    "SLURM_RESTART_COUNT": "1",
    "SLURM_SUBMIT_DIR": "/home/me",
    "SLURM_CPUS_PER_TASK": "6",
    "SLURM_CPUS_ON_NODE": "6",
    "SLURM_MEM_PER_CPU": "100",
    "SLURM_PROCID": "2",
    "PMIX_RANK": "2",
    "PATH": "/bin",
}


def test_an_allocation_is_read_from_its_environment() -> None:
    found = SlurmAllocation.here(ENV)
    assert (found.nodes, found.num_nodes, found.num_restarts) == ("n[1-3]", 3, 1)
    assert len(found.steps()) == 1
    assert found.steps()[0][-3:] == ["--nodes=3", "--ntasks=3", "--cpus-per-task=6"]
    with pytest.raises(UsageError, match="in no allocation of SLURM"):
        SlurmAllocation.here({})
    mixed = {**ENV, "SLURM_HET_SIZE": "2"}
    for group, number in enumerate("12"):
        mixed |= {
            f"SLURM_JOB_NODELIST_HET_GROUP_{group}": f"g{group}",
            f"SLURM_JOB_NUM_NODES_HET_GROUP_{group}": number,
        }
    found = SlurmAllocation.here(mixed)
    assert (found.nodes, found.num_nodes) == ("g0,g1", 3)
    assert [step[-1] for step in found.steps()] == ["--het-group=0", "--het-group=1"]


def test_an_agent_offers_what_slurm_gave_its_node() -> None:
    given = {"master": "tcp://a:1", "folder": Path("/f"), "address": "10.0.0.3", "devices": None}
    words = agent_arguments(ENV, **given, spare_from=2, group=1, until_eof=True)  # type: ignore[arg-type]
    flags = dict(zip(words[::2], words[1::2], strict=True))
    assert flags["--node-id"] == "n3"
    assert flags["--labels"] == "slurm_job=12,spare=true"
    assert (flags["--cpus"], flags["--memory-mb"]) == ("6", "600")
    assert flags["--resources"] == '{"slurm_het_group_1": 1000000}'
    assert (flags["--key-fd"], flags["--leave-at-eof"], flags["--state-dir"]) == ("0", "0", "/f/n3")
    assert flags["--address"] == "10.0.0.3"
    given |= {"folder": None, "address": None, "devices": 2}
    grown = agent_arguments(ENV, **given, spare_from=None, group=None, until_eof=False)  # type: ignore[arg-type]
    assert "n3-12" in grown
    assert not {"--leave-at-eof", "--address"} & set(grown)
    assert agent_environment(ENV).keys() == ENV.keys() - {"SLURM_PROCID", "PMIX_RANK"}


def test_what_agents_are_started_with_is_in_the_script() -> None:
    text = lines(a_job(), Slurm(interface="ib0", container_image="nvcr.io#nvidia/pytorch:26.01-py3", requeues=1))
    assert (
        " exec --nodes=4 --interface=ib0 '--container-image=nvcr.io#nvidia/pytorch:26.01-py3' --requeues=1" in text[-1]
    )
    text = lines(a_job(accelerator_type="CPU"), Slurm(apptainer="/images/my torch.sif"))
    assert " exec --nodes=4 --devices=2 '--apptainer=/images/my torch.sif' -- " in text[-1]
    with pytest.raises(UsageError, match="--container-image and --apptainer exclude each other"):
        lines(a_job(), Slurm(container_image="a", apptainer="b"))


def test_agents_in_an_image_run_the_unified_of_the_image() -> None:
    """Neither Pyxis nor Apptainer is run here: these are the words for them."""

    def step(env: dict[str, str], **chosen: Any) -> str:
        return " ".join(NodeOptions(**chosen).in_step(["srun", "-N2"], UNIFIED, Path("/home/me/sft"), env))

    assert step({}) == "srun -N2 /venv/bin/python -P -m unified"
    pyxis = "srun -N2 --container-image=torch --container-mounts=/home/me/sft:/home/me/sft{}"
    pyxis += " --container-workdir=/home/me/sft unified"
    assert step({}, container_image="torch") == pyxis.format("")
    assert step({"PYXIS_CONTAINER_MOUNTS": "/data:/data:ro"}, container_image="torch") == pyxis.format(
        ",/data:/data:ro"
    )
    apptainer = "srun -N2 apptainer exec{} --bind /home/me/sft a.sif unified"
    assert step({}, apptainer="a.sif") == apptainer.format(" --nv")
    assert step({"APPTAINER_ROCM": "1"}, apptainer="a.sif") == apptainer.format("")
    assert step({}, apptainer="a.sif", devices=2) == apptainer.format("")


@pytest.mark.parametrize(
    ("nodes", "chosen", "env", "refused"),
    [
        (4, {}, {}, "partition 'dev' has 3 nodes, and 4 are asked for: the job would wait for ever"),
        (3, {}, {}, ""),
        (2, {"spare_nodes": 2}, {}, "'dev' has 3 nodes, and 4 are asked for"),
        (4, {"partition": "big"}, {}, ""),
        (9, {"partition": "dev,big"}, {}, "partition 'big' has 8 nodes, and 9 are asked for"),
        (4, {"sbatch": ["-p", "big"]}, {}, ""),
        (4, {"partition": "big"}, {"SBATCH_PARTITION": "dev"}, "'dev' has 3 nodes"),
        (4, {"partition": "hidden"}, {}, ""),
        (4, {"sbatch": ["--clusters=other"]}, {}, ""),
        (4, {}, {"SLURM_CLUSTERS": "other"}, ""),
        (2, {"sbatch": ["-N", "3-20"]}, {}, ""),
        (2, {"sbatch": ["-N", "4-20"]}, {}, "'dev' has 3 nodes, and 4 are asked for"),
        (2, {"sbatch": ["-N", "4:8"]}, {}, ""),
        (2, {"groups": {"env": ["-N", "9", "-p", "big"]}}, {}, "'big' has 8 nodes, and 9 are asked for"),
        (2, {"groups": {"env": ["-N", "4"]}}, {}, "'dev' has 3 nodes, and 4 are asked for"),
        (2, {"partition": "big", "groups": {"env": []}}, {}, ""),
    ],
)
def test_more_nodes_than_a_partition_has_are_refused(
    nodes: int, chosen: dict[str, Any], env: dict[str, str], refused: str
) -> None:
    needs = batch.Demand(nodes=nodes, max_nodes=nodes, gpus=0, cpus=1, memory_mb=0, devices=None, grace_s=10)
    context = pytest.raises(UsageError, match=refused) if refused else contextlib.nullcontext()
    with context:
        batch.check_sizes(needs, Slurm(**chosen), {"dev": 3, "big": 8}, "dev", env)
    batch.check_sizes(needs, Slurm(**chosen), {}, "", env)  # nothing is known


@pytest.mark.parametrize(
    ("shown", "found"),
    [
        ("dev*|3\nbig|8\ndev*|2\n", ({"dev": 5, "big": 8}, "dev")),
        ("big|1.2K\nsinfo: odd\n|\n\n", ({}, "")),
        (None, ({}, "")),
    ],
)
def test_sizes_of_partitions_as_far_as_sinfo_says(
    monkeypatch: pytest.MonkeyPatch, shown: str | None, found: tuple[dict[str, int], str]
) -> None:
    def call(words: list[str]) -> str:
        if shown is None:
            raise commands.SlurmError("sinfo is not on the path")
        return shown

    monkeypatch.setattr(commands, "call", call)
    assert commands.partitions() == found


def test_facts_of_a_job_as_scontrol_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "JobId=12 ArrayJobId=11 JobState={} ExitCode={} EndTime={} WorkDir=/home/me/a b StdErr=/x Power=\n"
    shown = line.format("RUNNING", "0:0", "2026-11-26T07:00:00") + line.format("CANCELLED", "75:0", "Unknown")
    shown += "JobId=29 HetJobId=28 HetJobOffset=1 JobState=FAILED ExitCode=3:0 EndTime=Unknown WorkDir=/w"
    monkeypatch.setattr(commands, "call", lambda words: shown)
    running, cancelled, failed = commands.jobs("11")
    assert (running.state, running.is_over, running.exit_code) == ("RUNNING", False, 0)
    assert running.folder == Path("/home/me/a b/.unified/12")
    assert running.ends_at is not None
    unlimited = shown.replace("EndTime=2026", "TimeLimit=365-00:00:00 EndTime=2026")  # as the backfill scheduler writes
    assert (commands.ends_at("12"), commands.ends_at("13")) == (running.ends_at, None)
    monkeypatch.setattr(commands, "call", lambda words: unlimited)
    assert commands.ends_at("12") is None
    assert (cancelled.is_over, cancelled.exit_code, cancelled.ends_at) == (True, 143, None)
    assert (failed.slurm_id, failed.exit_code, failed.folder) == ("28", 3, Path("/w/.unified/28"))


def test_given_gpus_and_memory_are_not_asked_for_twice() -> None:
    text = lines(a_job(), Slurm(sbatch=["--gres=gpu:h100:2", "--mem-per-cpu=1G"]))
    assert not any("--gpus-per-node" in line or "--mem=" in line for line in text)


def test_a_script_for_torchrun_keeps_its_options_and_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    words = [
        "-t",
        "10:00",
        "--nnodes=2",
        "--apptainer",
        "a.sif",
        "--tee",
        "3",
        "--nproc-per-node=4",
        "--name",
        "mine",
        "train.py",
        "-t",
        "5",
        "-p",
    ]
    assert main(["slurm", "run", "--print", *words]) == 0
    text = capsys.readouterr().out.splitlines()
    assert "#SBATCH --time=10:00" in text
    assert "#SBATCH --gpus-per-node=4" in text
    assert " slurm exec --nodes=2 --apptainer=a.sif -- " in text[-1]
    driver = " -m unified run --no-wait --nnodes=2 --tee 3 --nproc-per-node=4 --name mine train.py -t 5 -p"
    assert text[-1].endswith(driver)
