"""Jobs on a real SLURM: slurmctld and three slurmd, with nodes that are processes of this host."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from tests.slurm.conftest import Site
from unified import process
from unified.testing import eventually

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
EXAMPLE = Path(__file__).parents[2] / "examples/nanogpt"
WRAPPER = """
import submit

def job():
    return submit.describe(submit.parse(["--steps", "40"]))
"""


def agents_of(site: Site, node: str) -> list[int]:
    """Pids of the agents of a node."""
    found = []
    for one in process.every_process():
        try:
            words = Path(f"/proc/{one.pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"unified_agent" in words and node.encode() in words:
            found.append(one.pid)
    return [pid for pid in found if process.has_environment(pid, f"SLURM_CONF={site.slurm.conf}")]


def test_nanogpt_trains(site: Site) -> None:
    pytest.importorskip("plotext", reason="an extra of the examples")
    (site.folder / "nanogpt.py").write_text(WRAPPER)
    slurm_id = site.submit("nanogpt.py", "-t", "10:00", PYTHONPATH=str(EXAMPLE))
    site.until_ended(slurm_id)
    output = site.output(slurm_id)
    assert re.search(r"job nanogpt-\S+ finished after", output)
    assert re.search(r"step +40\b", output), output
    assert (site.folder / "out/nanogpt/sample.txt").read_text().startswith("def ")


def test_the_script_that_is_printed_is_one_for_sbatch(site: Site) -> None:
    printed = site.unified("slurm", "submit", "job.py:alone", "-t", "10:00", "--print")
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=job-")
    (site.folder / "job.sbatch").write_text(printed.stdout)
    (site.folder / "finish").touch()
    sent = site.run("sbatch", "--parsable", "job.sbatch")
    assert sent.returncode == 0, sent.stderr
    site.until_ended(sent.stdout.strip())
    assert len(site.notes("from")) == 1
    assert site.unified("slurm", "submit", "job.py:four", "--print").returncode == 0, (
        "whatever the nodes that there are"
    )


def test_the_exit_code_is_that_of_the_job(site: Site) -> None:
    slurm_id = site.submit("job.py:failing")
    site.until_ended(slurm_id, "FAILED 1:0")
    assert "exited with code 7" in site.output(slurm_id)
    story = next((site.folder / ".unified" / slurm_id).glob("explain-*.txt"))
    assert f"next     less {story}" in site.output(slurm_id)
    assert "exited with code 7" in story.read_text()
    eventually(lambda: site.orphans(slurm_id) == [], timeout=100)


def test_a_worker_that_fails_for_good_frees_all_nodes_within_ten_seconds(site: Site) -> None:
    slurm_id = site.submit("job.py:failing_pair", "--name", "lost")
    eventually(lambda: site.slurm.state_of(slurm_id) == "FAILED 1:0", timeout=120, message=site.output(slurm_id))
    eventually(site.are_free, timeout=100)
    took_s = time.time() - max(float(words[1]) for words in site.notes("fails") if words[0] == "1")
    assert took_s < 10, site.output(slurm_id)
    assert site.orphans(slurm_id) == []


def test_the_doctor_says_what_is_wrong_with_a_node_and_both_are_in_the_image(site: Site) -> None:
    """Apptainer cannot run here: a stand-in notes its words, and runs the command outside of any image."""
    stand_in = site.folder / "bin/apptainer"
    stand_in.parent.mkdir()
    stand_in.write_text(
        f'#!/bin/bash\necho "$@" >> {site.folder}/words\nuntil [ "$1" = image.sif ]; do shift; done\nexec "${{@:2}}"\n'
    )
    stand_in.chmod(0o755)
    path = f"{stand_in.parent}:{Path(sys.executable).parent}:{site.slurm.env()['PATH']}"
    words = ["job.py:alone", "--sbatch=--nodelist=n2", "--apptainer", "image.sif"]
    slurm_id = site.submit(*words, UNIFIED_HOME="/proc/nowhere", PATH=path)
    eventually(lambda: "unified doctor: node n2: folder: " in site.output(slurm_id), timeout=120)
    assert "/proc/nowhere" in site.output(slurm_id)
    (site.folder / "finish").touch()
    site.until_ended(slurm_id)
    agent, doctor = sorted((site.folder / "words").read_text().splitlines(), key=lambda line: " doctor " in line)
    assert agent.startswith(f"exec --nv --bind {site.folder} image.sif unified slurm agent --master tcp://127.0.0.1:")
    assert doctor == f"exec --nv --bind {site.folder} image.sif unified doctor --host --quiet"


def test_two_jobs_on_one_node_do_not_hear_of_each_other(site: Site) -> None:
    first, second = (site.submit("job.py:alone", "--name", name, "--sbatch=--nodelist=n1") for name in ("one", "two"))
    eventually(lambda: len(site.notes("from")) == 2, timeout=120, message=site.output(first) + site.output(second))
    assert {words[-1] for words in site.notes("from")} == {"n1"}
    for slurm_id, own, other in ((first, "one", "two"), (second, "two", "one")):
        jobs = site.unified("--slurm", slurm_id, "jobs").stdout
        assert f"{own}-1" in jobs
        assert f"{other}-1" not in jobs
        assert "[ELASTIC-0] from 0 " in site.unified("--slurm", slurm_id, "logs", own).stdout
    folder = site.folder / ".unified"
    keys = [folder / slurm_id / "cluster.key" for slurm_id in (first, second)]
    assert keys[0].read_bytes() != keys[1].read_bytes()
    address = (folder / first / "master.address").read_text().strip()
    refused = site.unified("nodes", UNIFIED_MASTER=address, UNIFIED_KEY_FILE=str(keys[1]))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "key" in refused.stderr
    (site.folder / "finish").touch()
    site.until_ended(first)
    site.until_ended(second)


def test_a_job_that_loses_a_node_goes_on_with_the_one_in_reserve(site: Site) -> None:
    slurm_id = site.submit("job.py:pair", "--name", "spared", "--spare-nodes", "1")
    eventually(lambda: len(site.notes("from")) == 2, timeout=120, message=site.output(slurm_id))
    nodes = {words[-1] for words in site.notes("from")}
    assert len(nodes) == 2
    eventually(lambda: all((site.folder / f"saved-{rank}").exists() for rank in "01"), timeout=100)
    lost = max(nodes)  # the master and the driver are on the first one
    try:
        site.slurm.kill_node(lost)
        eventually(lambda: len(site.notes("from")) >= 4, timeout=120, message=site.output(slurm_id))
        assert {words[-1] for words in site.notes("from")[2:]} == set(site.slurm.names) - {lost}
        assert all(int(words[1]) > 0 for words in site.notes("from")[2:]), "they begin where they have saved"
        story = site.unified("--slurm", slurm_id, "explain", "spared").stdout
        assert f"node {lost}" in story
        eventually(lambda: site.slurm.states()[lost].startswith("down"), timeout=120)
        assert site.slurm.state_of(slurm_id) == "RUNNING", "the allocation is kept without the node"
        (site.folder / "finish").touch()
        eventually(
            lambda: re.search(r"job spared-1-\w+ finished", site.output(slurm_id)),
            timeout=120,
            message=site.output(slurm_id),
        )
        ended_at = time.monotonic()
        site.until_ended(slurm_id)
        eventually(site.are_free, timeout=100)
        assert time.monotonic() - ended_at < 10
    finally:
        site.slurm.start_node(lost)
        eventually(lambda: site.slurm.states()[lost] == "idle", timeout=100)


def until_begun(site: Site, slurm_id: str, number: int) -> set[str]:
    """Wait until workers have begun so often, and return the nodes of the last two."""
    eventually(lambda: len(site.notes("from")) >= number, timeout=120, message=site.output(slurm_id))
    return {words[-1] for words in site.notes("from")[-2:]}


def start_again(site: Site, slurm_id: str) -> None:
    """Start a job that was requeued some seconds ago: SLURM itself would wait for two minutes, and says so a moment
    after. Started at once, it fails: a slurmd takes no job whose credential it has just revoked.
    """
    time.sleep(6)

    def is_started() -> bool:
        if site.slurm.state_of(slurm_id) == "PENDING":
            site.slurm.run("scontrol", "update", f"jobid={slurm_id}", "starttime=now")
            time.sleep(3)  # SLURM's scheduler takes its time, and each update begins it anew
        return site.slurm.state_of(slurm_id) == "RUNNING"

    try:
        eventually(is_started, timeout=100)
    except AssertionError:
        why = site.slurm.run("scontrol", "show", "job", slurm_id, "--oneliner")
        raise AssertionError(f"{why}\n{site.slurm.states()}\n{site.output(slurm_id)}") from None


def test_at_the_time_limit_a_job_saves_and_goes_on_elsewhere_twice(site: Site) -> None:
    """The first time is SLURM's own signal before a limit of two minutes; the second one is sent by hand."""
    slurm = site.slurm
    slurm_id = site.submit("job.py:pair", "--name", "long", "-t", "2", "--sbatch=--signal=B:USR1@45")
    for number in (1, 2):
        drained = min(until_begun(site, slurm_id, 2 * number))
        end = datetime.fromisoformat(slurm.run("squeue", "-h", "-j", slurm_id, "-o", "%e").strip()).timestamp()
        assert [int(words[1]) for words in site.notes("ends")[-2:]] == [pytest.approx(end, abs=20)] * 2
        slurm.run("scontrol", "update", f"nodename={drained}", "state=drain", "reason=test")
        try:
            if number == 2:
                slurm.run("scancel", "--signal=USR1", "--batch", slurm_id)
            eventually(lambda: slurm.state_of(slurm_id) == "PENDING", timeout=180, message=site.output(slurm_id))
            eventually(lambda: not site.processes(slurm_id), timeout=100)
            slurm.run("scontrol", "update", f"jobid={slurm_id}", "timelimit=20")  # SLURM itself sends no second signal
            start_again(site, slurm_id)
            nodes = until_begun(site, slurm_id, 2 * number + 2)
        finally:
            slurm.run("scontrol", "update", f"nodename={drained}", "state=resume")
        assert nodes == set(slurm.names) - {drained}
        saved, begun = (sorted(words[:2] for words in site.notes(kind)[-2:]) for kind in ("at", "from"))
        assert begun == saved
    assert site.status(slurm_id, "long")["budgets"] == []
    story = site.unified("--slurm", slurm_id, "explain", "long").stdout
    assert f"SLURM ends allocation {slurm_id}" in story
    assert "it goes on in restart 2" in story
    (site.folder / "finish").touch()
    site.until_ended(slurm_id)
    assert site.warnings(slurm_id) == []
    eventually(lambda: site.orphans(slurm_id) == [], timeout=100)


def test_a_job_that_the_user_requeues_saves_and_goes_on(site: Site) -> None:
    slurm_id = site.submit("job.py:pair", "--name", "requeued")
    until_begun(site, slurm_id, 2)
    eventually(lambda: all((site.folder / f"saved-{rank}").exists() for rank in "01"), timeout=100)
    site.slurm.run("scontrol", "requeue", slurm_id)
    eventually(lambda: not site.processes(slurm_id), timeout=100)
    start_again(site, slurm_id)
    until_begun(site, slurm_id, 4)
    saved, begun = (sorted(words[:2] for words in site.notes(kind)[-2:]) for kind in ("at", "from"))
    assert begun == saved
    assert min(int(step) for _, step in begun) > 0
    assert site.status(slurm_id, "requeued")["budgets"] == []
    (site.folder / "finish").touch()
    site.until_ended(slurm_id)


def test_without_requeues_a_job_at_its_time_limit_has_failed(site: Site) -> None:
    slurm_id = site.submit("job.py:alone", "--name", "once", "--requeues", "0")
    eventually(lambda: site.notes("from"), timeout=120, message=site.output(slurm_id))
    site.slurm.run("scancel", "--signal=USR1", "--batch", slurm_id)
    site.until_ended(slurm_id, "FAILED 75:0")
    assert "the job has not ended, and --requeues 0 are used up" in site.output(slurm_id)
    assert site.notes("at"), "it has saved"
    eventually(lambda: site.orphans(slurm_id) == [], timeout=100)


def test_a_job_that_is_cancelled_at_its_time_limit_does_not_come_back(site: Site) -> None:
    slurm_id = site.submit("job.py:pair", "--name", "both")
    until_begun(site, slurm_id, 2)
    site.slurm.run("scancel", "--signal=USR1", "--batch", slurm_id)
    eventually(lambda: "SLURM ends allocation" in site.output(slurm_id), timeout=100)
    site.slurm.run("scancel", slurm_id)
    eventually(lambda: not site.slurm.run("squeue", "-h", "-j", slurm_id), timeout=100, message=site.output(slurm_id))
    assert site.slurm.state_of(slurm_id).startswith("CANCELLED")


def test_a_driver_of_two_jobs_and_one_of_none_are_requeued_too(site: Site) -> None:
    (site.folder / "two.py").write_text("import job, sys\nif __name__ == '__main__':\n    sys.exit(job.two())\n")
    jobs = {}
    for name, words in (("two", [sys.executable, "two.py"]), ("none", ["sleep", "600"])):
        command = shlex.join([sys.executable, "-m", "unified", "slurm", "exec", "--", *words])
        script = f"#!/bin/bash\n#SBATCH -N 1 -t 10 -o {name}-%j.out --requeue --no-kill\nexec {command}\n"
        (site.folder / f"{name}.sbatch").write_text(script)
        jobs[name] = site.run("sbatch", "--parsable", f"{name}.sbatch").stdout.strip()
    eventually(lambda: site.notes("from") and "joined" in site.output(jobs["none"]), timeout=120)
    for slurm_id in jobs.values():
        site.slurm.run("scontrol", "update", f"jobid={slurm_id}", "timelimit=1")  # so that no driver has long
        site.slurm.run("scancel", "--signal=USR1", "--batch", slurm_id)
    waiting = dict.fromkeys(jobs, "PENDING")
    eventually(lambda: {name: site.slurm.state_of(jobs[name]) for name in jobs} == waiting, timeout=120)


def test_a_range_of_nodes_is_used_as_a_whole_and_a_second_cluster_is_refused(site: Site) -> None:
    (site.folder / "range.py").write_text("import job\njob.train()\n")
    words = [sys.executable, "-m", "unified", "slurm", "run", "--nnodes=2:3", "--nproc-per-node=1", "--devices", "1"]
    sent = site.run(*words, "--sbatch=--nodes=3", "range.py")  # of a range SLURM may give the least
    assert sent.returncode == 0, sent.stderr
    slurm_id = sent.stdout.strip()
    eventually(lambda: len(site.notes("from")) >= 3, timeout=120, message=site.output(slurm_id))
    assert {words[-1] for words in site.notes("from")} == set(site.slurm.names)
    again = [sys.executable, "-m", "unified", "slurm", "up"]
    second = site.run("srun", "--overlap", f"--jobid={slurm_id}", "-N", "1", "-n", "1", *again)
    assert f"allocation {slurm_id} has a cluster already" in second.stderr
    assert site.unified("--slurm", slurm_id, "nodes").stdout.count("ALIVE") == 3
    (site.folder / "finish").touch()
    site.until_ended(slurm_id)


def test_scancel_leaves_nothing(site: Site) -> None:
    slurm_id = site.submit("job.py:sharing", "--name", "cancelled")
    eventually(lambda: len(site.notes("from")) == 2, timeout=120, message=site.output(slurm_id))
    assert [words[1] for words in site.notes("ends")] == ["never"] * 2
    assert len(site.processes(slurm_id)) > 6
    shared = site.shared_memory(slurm_id)
    assert shared, "both ranks hold an array"
    site.slurm.run("scancel", slurm_id)
    eventually(lambda: not site.slurm.run("squeue", "-h", "-j", slurm_id), timeout=100, message=site.output(slurm_id))
    eventually(lambda: site.orphans(slurm_id) == [], timeout=100)
    eventually(lambda: not [path for path in shared if Path(path).exists()], timeout=100)
    folder = site.folder / ".unified" / slurm_id
    assert not (folder / "master.address").exists()
    ranks = [(rank, node) for rank, _, node in site.notes("from")]
    saved = [[rank, (site.folder / f"saved-{rank}").read_text(), node] for rank, node in ranks]
    assert sorted(site.notes("at")) == sorted(saved)


def test_roles_of_a_heterogeneous_job_are_on_the_nodes_of_their_component(site: Site) -> None:
    group = "env=--partition=dev --nodes=2 --nodelist=n1,n3"
    slurm_id = site.submit("job.py:roles", "--group", group, UNIFIED_HOME="/proc/nowhere")
    wrong = [f"unified doctor: node {node}: folder: " for node in site.slurm.names]
    eventually(lambda: all(each in site.output(slurm_id) for each in wrong), timeout=100)
    (site.folder / "finish").touch()
    site.until_ended(slurm_id)
    assert sorted(words[-1] for words in site.notes("env")) == ["n1", "n3"]
    assert [words[-1] for words in site.notes("from")] == ["n2"]


def test_a_component_is_in_a_partition_of_its_own(site: Site) -> None:
    (site.folder / "finish").touch()
    slurm_id = site.submit("job.py:roles", "-p", "dev", "--group", "env=-p cpu -N 1 -c 2", NODES="2")
    assert sorted(site.slurm.run("squeue", "-h", "-t", "all", "-j", slurm_id, "--format=%P").split()) == ["cpu", "dev"]
    site.until_ended(slurm_id)
    assert [words[-1] for words in site.notes("env")] == ["n3"] * 2  # which is the only node of this partition
    assert [words[-1] for words in site.notes("from")] in (["n1"], ["n2"])


def test_an_array_has_a_cluster_for_each_of_its_jobs(site: Site) -> None:
    array_id = site.submit("job.py:array", "--array", "0-2")
    eventually(lambda: len(site.notes("env")) == 3, timeout=120)
    assert sorted(words[0] for words in site.notes("env")) == ["0", "1", "2"]
    eventually(lambda: not site.slurm.run("squeue", "-h", "-j", array_id), timeout=100)
    outputs = [path.read_text() for path in site.folder.glob(f"*-{array_id}_*.out")]
    assert len(outputs) == 3
    assert all("finished after" in output for output in outputs)


def test_an_allocation_of_salloc_is_a_cluster_which_grows_and_can_be_attached(site: Site) -> None:
    command = [sys.executable, "-m", "unified", "slurm", "up", "--devices", "1", "--interface", "lo"]
    up = site.begin("salloc", "-N", "2", *command)
    try:
        eventually(lambda: list(site.folder.glob(".unified/*/master.address")), timeout=120)
        slurm_id = next(site.folder.glob(".unified/*/master.address")).parent.name

        def alive() -> int:
            return site.unified("--slurm", slurm_id, "nodes").stdout.count("ALIVE")

        eventually(lambda: alive() == 2, timeout=100)
        for pid in (*agents_of(site, "n1"), *agents_of(site, "n2")):
            assert "--address 127.0.0.1" in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        grown = site.unified("--slurm", slurm_id, "slurm", "grow", "1", "-t", "5")
        assert grown.returncode == 0, grown.stderr
        eventually(lambda: alive() == 3, timeout=100)
        attached = site.unified("slurm", "attach", slurm_id, "--", sys.executable, "-m", "unified", "nodes")
        assert attached.stdout.count("ALIVE") == 3, attached.stderr
        (site.folder / "finish").touch()
        done = site.unified("--slurm", slurm_id, "submit", "job.py:pair", "--name", "inside")
        assert done.returncode == 0, done.stderr
        assert len(site.notes("from")) == 2
    finally:
        (pid,) = [one.pid for one in process.every_process() if one.parent == up.pid]
        os.kill(pid, signal.SIGINT)
        out, err = up.communicate(timeout=120)
    assert f"unified --slurm {slurm_id} nodes" in err, out + err
    eventually(lambda: not site.processes(slurm_id), timeout=100)


def test_a_program_submits_itself(site: Site) -> None:
    (site.folder / "finish").touch()
    (site.folder / "program.py").write_text(
        "import job, sys\n"
        "from unified.slurm import Slurm\n"
        "if __name__ == '__main__':\n"
        "    handle = job.alone().submit('itself', on=Slurm(time='5'), blocking=False)\n"
        "    print(handle.slurm_id, handle.state)\n"  # in the allocation, too, where it is a JobHandle
        "    sys.exit(handle.wait())\n"
    )
    done = site.run(sys.executable, "program.py")
    assert done.returncode == 0, done.stderr
    assert len(site.notes("from")) == 1


def test_a_program_looks_at_its_job_and_cancels_it(site: Site) -> None:
    (site.folder / "program.py").write_text(
        "import job\n"
        "from unified.slurm import Slurm, SlurmJob\n"
        "if __name__ == '__main__':\n"
        "    sent = job.alone().submit('looked-at', on=Slurm(time='5'), blocking=False)\n"
        "    if not isinstance(sent, SlurmJob):  # on the first node\n"
        "        raise SystemExit(sent.wait())\n"
        "    with sent.handle(timeout_s=100) as handle:\n"
        "        print(sent.slurm_id, sent.state, handle.status().name)\n"
        "    sent.cancel()\n"
        "    print(sent.wait(timeout_s=100))\n"
    )
    done = site.run(sys.executable, "program.py")
    assert re.fullmatch(r"\d+ RUNNING looked-at\n143\n", done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["job.py:four", "--sbatch=-N 3"], "--nodes=3 is too few: the job needs 4 nodes"),
        (["job.py:four"], "partition 'dev' has 3 nodes, and 4 are asked for: the job would wait for ever"),
        (["job.py:pair", "-p", "cpu"], "partition 'cpu' has 1 node, and 2 are asked for"),
        (
            ["job.py:alone", "--apptainer=a.sif", "--container-image=b"],
            "--container-image and --apptainer exclude each ot",
        ),
        (["job.py:alone", "-p", "gpu"], "sbatch refused: invalid partition specified: gpu"),
        (["job.py:alone", "-t", "soon"], "sbatch refused: Invalid --time specification"),
        (
            ["job.py:roles", "--group", "envs=-N 2"],
            "has no role 'envs' to be put into a group. Did you mean 'env'?",
        ),
        (["job.py:roles", "--group", "env"], "--group 'env' is not ROLE=OPTIONS"),
        (["nothing.py"], "nothing.py is not a file"),
    ],
    ids=[
        "too few nodes",
        "small cluster",
        "small partition",
        "two images",
        "partition",
        "time",
        "role",
        "group",
        "file",
    ],
)
def test_what_cannot_be_is_one_sentence(site: Site, words: list[str], message: str) -> None:
    done = site.unified("slurm", "submit", *words)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not site.slurm.run("squeue", "--noheader")
    assert not (site.folder / ".unified").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "2"], r"allocation \d+ has 1 node, and the job needs 2: ask for more with -N 2"),
        (["--interface", "ib7"], r"host \S+ has no network interface 'ib7' with an address; lo\b.* have one\."),
    ],
    ids=["too small", "interface"],
)
def test_an_allocation_that_will_not_do_is_said_before_anything_starts(
    site: Site, words: list[str], message: str
) -> None:
    done = site.run("salloc", "-N", "1", sys.executable, "-m", "unified", "slurm", "exec", *words, "--", "true")
    assert done.returncode == 2
    assert re.search(message, done.stderr)
    slurm_id = re.search(r"job allocation (\d+)", done.stderr)
    assert slurm_id is not None, done.stderr
    assert site.orphans(slurm_id[1]) == []


def test_without_slurm_it_says_what_is_needed(site: Site) -> None:
    done = site.unified("slurm", "submit", "job.py:alone", PATH="/nonexistent")
    assert done.returncode == 1
    assert done.stderr == "unified: sbatch is not on the path: this needs SLURM's commands, as a login node has them.\n"
    assert not (site.folder / ".unified").exists()
    outside = site.unified("slurm", "exec", "--", "true")
    assert outside.returncode == 2
    assert "this process is in no allocation of SLURM" in outside.stderr
