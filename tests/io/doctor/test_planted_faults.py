"""`unified doctor` on a host with one fault: it finds that one, and no other.

The host is a mount namespace of the command alone, with a hosts file and a resolv.conf of its own, where files of the
system matter. torch is a stand-in, since importing the real one takes seconds; `test_doctor_with_torch` has that.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.support.deadlines import met, missed
from tests.support.master_process import StartMaster
from unified.doctor.host import Check, run
from unified.doctor.judgement import Finding, fine
from unified.testing import eventually

pytestmark = pytest.mark.processes

OF_THE_MACHINE = {"memory", "RemoveIPC", "NVIDIA driver"}
"""Checks of what a test cannot set, and that a machine on which it runs may fail."""
TORCH = "__version__ = '2.9.0'\nclass version:\n    cuda = hip = None\nclass cuda:\n    is_available = bool\n"
DOCTOR = ["-m", "unified", "doctor"]
NO_ENV: Mapping[str, str] = MappingProxyType({})


def why_no_mounts() -> str:
    """Why there can be no mount namespace here; empty if there can."""
    if shutil.which("unshare") is None:
        return "a host of its own needs unshare, of util-linux"
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True)
    return f"no mount namespace can be made: {done.stderr.strip()}" if done.returncode else ""


class Host:
    """A healthy host, in which a test plants a fault."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "torch.py").write_text(TORCH)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n192.0.2.7 {socket.gethostname()}\n")
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("UNIFIED_", "XDG_", "RES_"))}
        self.env = {**kept, "PYTHONPATH": str(folder), "HOME": str(folder / "home"), "UNIFIED_RUN_DIR": f"{folder}/run"}

    def examine(
        self, *words: str, plant: str = "true", env: Mapping[str, str] = NO_ENV, program: str = "", of_machine: str = ""
    ) -> dict[str, dict[str, str]]:
        """Return what is not fine, by check.

        Args:
            plant: of the shell, in the namespace, before the command.
            program: Python to run before the command, in its process.
            of_machine: check of `OF_THE_MACHINE` to look at.
        """
        script = 'mount --bind "$0/hosts" /etc/hosts && mount --bind "$0/resolv.conf" /etc/resolv.conf'
        run = ["-c", f"{program}\nfrom unified.cli.main import main\nraise SystemExit(main())", "doctor"]
        enter = ["unshare", "--mount", "sh", "-c", f'{script} && {plant} && exec "$@"', str(self.folder)]
        done = subprocess.run(
            [*enter, sys.executable, *(run if program else DOCTOR), *(words or ["--host"]), "--json"],
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=met(100),
        )
        assert done.stderr == "", done.stderr
        found = json.loads(done.stdout)
        assert done.returncode == int(any(each["severity"] == "wrong" for each in found))
        return {
            each["check"]: each
            for each in found
            if each["severity"] not in ("fine", "untested") and each["check"] not in OF_THE_MACHINE - {of_machine}
        }


@pytest.fixture
def host() -> Iterator[Host]:
    if why := why_no_mounts():
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="doctor") as folder:  # shorter than pytest's own: sockets lie below
        yield Host(Path(folder))


def only(found: dict[str, dict[str, str]], check: str, severity: str, text: str) -> None:
    """Assert that this finding is the only one, and that it says so."""
    assert set(found) == {check}, found
    assert (found[check]["severity"], text in f"{found[check]['what']} {found[check].get('advice', '')}") == (
        severity,
        True,
    ), found


def test_a_healthy_host(host: Host) -> None:
    assert host.examine() == {}
    assert not (host.folder / "run").exists(), "it has left something"


def test_a_key_file_that_others_can_read(host: Host) -> None:
    key = host.folder / "cluster.key"
    subprocess.run([sys.executable, "-m", "unified", "key", "new", key], check=True, capture_output=True)
    assert host.examine(env={"UNIFIED_KEY_FILE": str(key)}) == {}
    key.chmod(0o644)
    only(host.examine(env={"UNIFIED_KEY_FILE": str(key)}), "cluster key", "wrong", f"chmod 600 {key}")


def test_a_key_file_that_is_missing(host: Host) -> None:
    only(host.examine(env={"UNIFIED_KEY_FILE": "/nowhere"}), "cluster key", "wrong", "`unified key new` makes a key")


@pytest.mark.slow
def test_a_name_server_that_does_not_answer(host: Host) -> None:
    (host.folder / "hosts").write_text("127.0.0.1 localhost\n")
    (host.folder / "resolv.conf").write_text("nameserver 127.0.0.77\n")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        try:
            silent.bind(("127.0.0.77", 53))
        except OSError as error:
            pytest.skip(f"no name server can be played: {error}")
        only(host.examine(), "own name", "wrong", "A name server of /etc/resolv.conf does not answer")
        assert silent.recv(512), "it was not asked"


def test_a_name_that_nobody_knows(host: Host) -> None:
    (host.folder / "hosts").write_text("127.0.0.1 localhost\n")
    only(host.examine(), "own name", "wrong", "to /etc/hosts")


def test_an_own_name_that_is_loopback(host: Host) -> None:
    (host.folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
    only(host.examine(), "own name", "note", "127.0.1.1: loopback, by which no other host reaches this one")


def test_a_small_dev_shm(host: Host) -> None:
    found = host.examine(plant="mount -t tmpfs -o size=64m none /dev/shm")
    only(found, "shared memory", "wrong", "--shm-size=16g")


def test_few_open_files(host: Host) -> None:
    only(host.examine(plant="ulimit -n 500"), "open files", "note", "is 500")
    only(host.examine(plant="ulimit -n 50"), "open files", "wrong", "at least 64 are needed")


def test_little_locked_memory_beside_rdma(host: Host) -> None:
    """The list of RDMA devices is a fake: the kernel makes it, of devices that few machines have."""
    (host.folder / "rdma" / "mlx5_0").mkdir(parents=True)
    fake = f"import pathlib, unified.doctor.host as host\nhost.RDMA = pathlib.Path('{host.folder}/rdma')"
    limited = 'ulimit -l 64 && set -- setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock "$@"'
    only(host.examine(program=fake, plant=limited), "locked memory", "wrong", "mlx5_0")


def test_a_state_folder_on_nfs(host: Host) -> None:
    """The list of mounts is a fake, since nothing here mounts NFS."""
    mounts = host.folder / "mounts"
    mounts.write_text(
        f"22 1 0:2 / / rw - ext4 /dev/sda rw\n23 22 0:3 / {host.folder}/state rw - nfs4 nas:/x rw\n"
        "24 22 0:4 / /dev/shm rw - tmpfs none rw\n"
    )
    fake = f"import pathlib, unified.config.mounts as mounts\nmounts.MOUNTS = pathlib.Path('{mounts}')"
    found = host.examine("--host", "--folder", f"{host.folder}/state/master", program=fake)
    only(found, "folder", "note", "nfs4, a network file system")


def test_a_full_disk(host: Host) -> None:
    (host.folder / "state").mkdir()
    found = host.examine(
        plant='mount -t tmpfs -o size=1m none "$0/state" && head -c 900000 /dev/zero > "$0/state/file"',
        env={"UNIFIED_HOME": f"{host.folder}/state"},
    )
    only(found, "folder", "wrong", "Make room")


def test_a_run_folder_with_a_long_path(host: Host) -> None:
    found = host.examine(env={"UNIFIED_RUN_DIR": f"{host.folder}/{'long' * 20}"})
    only(found, "run folder", "wrong", "set UNIFIED_RUN_DIR to a shorter one")


def test_a_run_folder_of_somebody_else(host: Host) -> None:
    (host.folder / "run").mkdir()
    os.chown(host.folder / "run", 12345, -1)
    only(host.examine(), "run folder", "wrong", "belongs to uid 12345")


def test_a_variable_that_is_no_setting(host: Host) -> None:
    found = host.examine(env={"UNIFIED_KEYFILE": "/etc/key", "UNIFIED_LEASE_S": "20"})
    only(found, "settings", "note", "UNIFIED_KEYFILE is no setting. Did you mean 'UNIFIED_KEY_FILE'?")


def test_a_torch_that_cannot_be_imported(host: Host) -> None:
    (host.folder / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    only(host.examine(), "torch", "wrong", "libcudart.so.12: cannot open shared object file")


@pytest.mark.parametrize(
    ("fault", "text"), [("FAKE_LOST", "device 1 does not answer"), ("FAKE_BROKEN", "NVML is installed")]
)
def test_a_driver_that_does_not_answer(fake_nvml: Path, host: Host, fault: str, text: str) -> None:
    """NVML is a stand-in, for machines without NVIDIA's devices."""
    env = {"LD_LIBRARY_PATH": str(fake_nvml), fault: "1"}
    found = host.examine(env=env, of_machine="NVIDIA driver")
    only(found, "NVIDIA driver", "wrong", text)


def test_a_logout_that_removes_shared_memory(host: Host) -> None:
    """A folder of logind's says that it runs, and any user counts as an ordinary one: tests run as root, without it."""
    plant = "mount -t tmpfs none /run && mkdir -p /run/systemd/seats"
    patch = "import pathlib, unified.doctor.host as host\nhost.FIRST_ORDINARY_UID = 0\n"
    patch += f"host.SYSTEMD = pathlib.Path('{host.folder}')"
    found = host.examine(plant=plant, program=patch, of_machine="RemoveIPC")
    only(found, "RemoveIPC", "note", "loginctl enable-linger")
    (host.folder / "logind.conf").write_text("[Login]\n#RemoveIPC=yes\nRemoveIPC=no\n")
    assert host.examine(plant=plant, program=patch, of_machine="RemoveIPC") == {}


def test_a_control_group_with_less_memory(host: Host) -> None:
    """The limits are a fake: the machines that tests run on have no memory controller."""
    limits = "from unified.config.cgroups import Limits\nhost.limits = lambda: Limits(None, 2**29)"
    found = host.examine(program=f"import unified.doctor.host as host\n{limits}", of_machine="memory")
    only(found, "memory", "note", "allow this process 512 MiB of")


def test_a_check_that_hangs_or_breaks_is_a_finding() -> None:
    never = threading.Event()

    def hang() -> Finding:
        never.wait(met(100))
        return fine("too late")

    def fail() -> Finding:
        raise RuntimeError("as the test says")

    checks = [Check("a", hang, "do this", missed(0.1)), Check("b", fail), Check("c", lambda: fine("well"))]
    found = [(each.check, each.severity, each.what, each.advice) for each in run(checks)]
    never.set()
    assert found == [
        ("a", "wrong", "no answer within 0.1 s", "do this"),
        ("b", "wrong", "as the test says", ""),
        ("c", "fine", "well", ""),
    ]


@pytest.mark.slow
def test_what_a_killed_agent_left(host: Host, start_master: StartMaster) -> None:
    master = start_master().address
    command = [sys.executable, "-m", "unified_agent", "--master", master, "--node-id", "n1"]
    agent = subprocess.Popen(command, env=host.env, stderr=subprocess.DEVNULL)
    try:
        locks = host.folder / "run" / "agents"
        eventually(lambda: any(path.stat().st_size for path in locks.glob("*.lock")), 100, "the agent has no lock")
        assert host.examine() == {}
    finally:
        agent.send_signal(signal.SIGKILL)
        agent.wait(100)
    # Its zygote and lease keeper end with it, in a moment of their own.
    eventually(lambda: "left their locks" in host.examine().get("killed agents", {}).get("what", ""), 100)
    only(host.examine(), "killed agents", "note", f"killed agents (node n1, pid {agent.pid})")


def test_a_process_that_a_killed_agent_left(host: Host) -> None:
    locks = host.folder / "run" / "agents"
    locks.mkdir(parents=True)
    (locks / "n1-0123456789ab.lock").write_text(
        '{"node": "n1", "pid": 1, "incarnation": "0a1b", "run_dir": "/", "start_ticks": 1}'
    )
    left = subprocess.Popen(["sleep", "100"], env={"UNIFIED_AGENT_INCARNATION": "0a1b", "PATH": os.environ["PATH"]})
    try:
        only(host.examine(), "killed agents", "wrong", f"processes: {left.pid}")
    finally:
        left.kill()
        left.wait()


def keys(folder: Path, *names: str) -> list[str]:
    made = [str(folder / name) for name in names]
    for each in made:
        subprocess.run([sys.executable, "-m", "unified", "key", "new", each], check=True, capture_output=True)
    return made


def test_a_key_that_is_not_the_masters(host: Host, start_master: StartMaster, monkeypatch: pytest.MonkeyPatch) -> None:
    right, other = keys(host.folder, "right.key", "other.key")
    monkeypatch.setenv("UNIFIED_KEY_FILE", right)
    address = start_master().address
    assert host.examine("--master", address, env={"UNIFIED_KEY_FILE": right}) == {}
    only(host.examine("--master", address, env={"UNIFIED_KEY_FILE": other}), "master", "wrong", "cluster key")


def test_a_master_whose_port_is_closed(host: Host, start_master: StartMaster) -> None:
    master = start_master()
    address = master.address
    assert host.examine("--master", address) == {}
    master.kill()
    found = host.examine("--master", address, env={"UNIFIED_CONNECT_S": "1"})
    only(found, "master", "wrong", "Connection refused")


def test_a_master_whose_clock_is_wrong(host: Host, start_master: StartMaster) -> None:
    """The master's wall clock is replaced, as that of the machine is not the test's to set."""
    program = (
        "import sys, time; real = time.time; time.time = lambda: real() - 90; from unified_master.cli import main; "
        "sys.exit(main())"
    )
    address = start_master(program=["-c", program]).address
    only(host.examine("--master", address), "clock", "wrong", "ahead of the master's")


def test_a_master_whose_name_nobody_knows(host: Host) -> None:
    found = host.examine("--master", "tcp://nobody.invalid:7077", env={"UNIFIED_CONNECT_S": "1"})
    assert set(found) == {"master's name", "master"}  # which cannot be asked either


@pytest.mark.slow
def test_a_node_that_is_not_reached(host: Host, start_master: StartMaster) -> None:
    """Its address is one of those that are for documents, to which no route leads."""
    address = start_master().address
    flags = ["--node-id", "far", "--address", "192.0.2.9", "--insecure"]
    agent = subprocess.Popen(
        [sys.executable, "-m", "unified_agent", "--master", address, *flags], env=host.env, stderr=subprocess.DEVNULL
    )
    try:
        nodes = [sys.executable, "-m", "unified", "nodes", "--json", "--master", address]
        eventually(lambda: b"far" in subprocess.check_output(nodes, env=host.env, timeout=met(100)), 100)
        found = host.examine("--master", address)
        assert set(found) == {"ports", "own address"}, found  # this host is only known by loopback, and that is far
        assert "node far" in found["ports"]["what"]
        assert "would tell others 127.0.0.1" in found["own address"]["what"]
    finally:
        agent.terminate()
        agent.wait(100)


def doctor(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *DOCTOR, *words], capture_output=True, text=True, timeout=met(200))


def test_doctor_with_torch() -> None:
    done = doctor("--host")
    line = next(line for line in done.stdout.splitlines() if "torch " in line)
    assert line.split()[:3] == ["fine", "torch", "torch"], done.stdout


def test_a_wrong_command_line() -> None:
    done = doctor("--host", "--master", "tcp://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "give one of them" in done.stderr
    assert doctor("--master", "tcp://:x").returncode == 2
