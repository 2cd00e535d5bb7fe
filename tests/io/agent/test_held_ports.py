"""Ports that an agent holds for workers, as the kernel of this host sees them."""

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from msgspec import structs

from tests.support.agent_core import FACTS, W0
from unified.config.ports import HELD_PORTS, bind_free
from unified.errors import UsageError
from unified.job.spec import EntryPoint, JobSpec, RoleSpec
from unified.protocol.agent_master import DesiredWorker
from unified.protocol.records import JobWorkerIncarnation
from unified.protocol.worker_agent import PortsHeld
from unified_agent.core.launching import start_of
from unified_agent.core.messages import HoldPorts, StartWorker
from unified_agent.ports import LINGER_S, HeldPorts

V4, V6 = socket.AF_INET, socket.AF_INET6
IP_LOCAL_PORT_RANGE = 51
"""Option that limits the ports which the kernel gives to a socket, since Linux 6.3."""
W1 = JobWorkerIncarnation("job-1", "w_2-1_2-1", 0)

needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the host has no IPv6")


@contextmanager
def holder(node: str = "n1") -> Iterator[HeldPorts]:
    with closing(HeldPorts(node)) as held:
        yield held


def listener(
    port: int, host: str, family: int = V4, *, reuse_addr: bool = True, reuse_port: bool = False, dual: bool = False
) -> socket.socket:
    """A server's socket; OSError: it cannot be bound, or cannot listen."""
    made = bound(port, host, family, reuse_addr=reuse_addr, reuse_port=reuse_port, dual=dual)
    try:
        made.listen()
    except OSError:
        made.close()
        raise
    return made


def bound(
    port: int, host: str, family: int = V4, *, reuse_addr: bool = True, reuse_port: bool = False, dual: bool = False
) -> socket.socket:
    made = socket.socket(family)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse_addr)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse_port)
        if family == V6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not dual)
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    return made


def can(act: Callable[[], socket.socket]) -> bool:
    """Could the socket be made? It is closed at once."""
    try:
        act().close()
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            raise
        return False
    return True


def is_free(port: int) -> bool:
    return can(lambda: listener(port, "", reuse_addr=False))


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> range:
    """Ten ports, all of them free now, which the agents of the test have."""
    for first in range(1100 + 10 * (os.getpid() % 1000), 20_000, 10):  # tests run side by side
        ports = range(first, first + 10)
        if all(is_free(port) for port in ports):
            monkeypatch.setenv("UNIFIED_PORT_RANGE", f"{ports[0]}-{ports[-1]}")
            return ports
    raise AssertionError("no ten ports in a row are free")


def test_no_port_is_given_twice_on_a_host(block: range) -> None:
    with holder() as ours, holder("n2") as other:
        given = [ours.hold("job-1", "a", 3), other.hold("job-1", "a", 3), ours.hold("job-1", "b", 2)]
        given.append(other.hold("job-2", "a", 2))
        assert sorted(port for ports in given for port in ports) == list(block)
        with pytest.raises(UsageError) as refused:
            ours.hold("job-1", "c", 2)
        assert str(refused.value) == (
            f"node n1 has not 2 more ports for worker c of job job-1: only 0 of {block[0]} to {block[-1]} are free. "
            "Give its agent a wider UNIFIED_PORT_RANGE."
        )
        other.close()
        with pytest.raises(UsageError, match="only 5 of"):
            ours.hold("job-1", "c", 6)
        assert sorted([*ours.hold("job-1", "c", 2), *ours.hold("job-1", "d", 3)]) == sorted(given[1] + given[3]), (
            "a request that fails holds nothing"
        )


def test_a_worker_keeps_its_ports_and_gets_more(block: range) -> None:
    with holder() as held:
        three = held.hold("job-1", "a", 3)
        assert held.hold("job-1", "a", 2) == three
        assert held.hold("job-1", "a", 0) == three
        five = held.hold("job-1", "a", 5)
        assert (five[:3], len(set(five))) == (three, 5)
        assert set(five) <= set(block)
        assert held.answer(HoldPorts(W0, 10)) == PortsHeld(
            num=10,
            error=f"node n1 has not 10 more ports for worker {W0.worker} of job job-1: only 5 of {block[0]} to "
            f"{block[-1]} are free. Give its agent a wider UNIFIED_PORT_RANGE.",
        )
        assert held.answer(HoldPorts(W0, 1)) == PortsHeld(num=1, ports=held.hold(W0.job_id, W0.worker, 0))
    with holder() as later:
        assert later.hold("job-1", "a", 5) == five, "the next agent of the node begins at the same port"


def test_without_a_range_the_ports_are_below_those_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNIFIED_PORT_RANGE", raising=False)
    with holder() as held, holder("n2") as other:
        ours, others = held.hold("job-1", "a", 3), other.hold("job-1", "a", 3)
        assert set(ours) | set(others) <= set(HELD_PORTS)
        assert not set(ours) & set(others)


@pytest.mark.parametrize(
    ("host", "family", "listens", "reuse_addr"),
    [
        ("", V4, True, True),
        ("127.0.0.1", V4, True, True),
        ("127.0.0.1", V4, False, True),  # a server that listens once its engine is ready
        ("127.0.0.1", V4, False, False),
        pytest.param("::", V6, True, True, marks=needs_ipv6),
        pytest.param("::1", V6, True, True, marks=needs_ipv6),
        pytest.param("::1", V6, False, True, marks=needs_ipv6),
    ],
)
def test_ports_of_other_programs_are_skipped(
    block: range, host: str, family: int, listens: bool, reuse_addr: bool
) -> None:
    with holder() as held, (listener if listens else bound)(block[4], host, family, reuse_addr=reuse_addr):
        assert set(held.hold("job-1", "a", 9)) == set(block) - {block[4]}


@pytest.mark.parametrize(
    ("host", "family", "dual"),
    [
        ("", V4, False),
        ("127.0.0.1", V4, False),
        pytest.param("::", V6, True, marks=needs_ipv6),
        pytest.param("::", V6, False, marks=needs_ipv6),
        pytest.param("::1", V6, False, marks=needs_ipv6),
    ],
)
def test_servers_that_can_listen_on_a_held_port(block: range, host: str, family: int, dual: bool) -> None:
    with holder() as held:
        (port,) = held.hold("job-1", "a", 1)

        def can_listen(**options: bool) -> bool:
            return can(lambda: listener(port, host, family, dual=dual, **options))

        assert can_listen()
        assert can_listen(reuse_port=True)
        assert not can_listen(reuse_addr=False), "such a bind is how other programs look for a free port"
    with holder() as held:  # a port on which nobody has listened yet
        (port,) = held.hold("job-1", "b", 1)
        assert can_listen(reuse_addr=False, reuse_port=True)
    assert can_listen(reuse_addr=False), "the port is nobody's now"


SERVER = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("listens", flush=True)
kept = [server.accept()[0] for _ in range(3)]
print("has them", flush=True)
sys.stdin.read()
"""


def test_a_server_listens_again_right_after_its_predecessor_was_killed(block: range) -> None:
    with holder() as held:
        (port,) = held.hold("job-1", "a", 1)
        words = [sys.executable, "-c", SERVER, str(port)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"listens\n"
            clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
            assert server.stdout.readline() == b"has them\n"
            with holder("n2") as other:
                assert port not in other.hold("job-1", "b", 9), "its server changes nothing for others"
            server.send_signal(signal.SIGKILL)
        for client in clients:
            assert client.recv(1) == b""
            client.close()
        assert can(lambda: listener(port, "127.0.0.1"))
        assert can(lambda: listener(port, ""))
        assert held.hold("job-1", "a", 1) == [port]
    assert not is_free(port), "no connection is in TIME_WAIT: the test shows nothing"


@pytest.fixture
def of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free port which the kernel itself could give out, as the one port that agents of this test have."""
    with bound(0, "") as found:
        port = int(found.getsockname()[1])
    monkeypatch.setenv("UNIFIED_PORT_RANGE", f"{port}-{port}")
    return port


def test_the_kernel_gives_a_held_port_to_nobody(of_the_kernel: int) -> None:
    port = of_the_kernel

    def limited(family: int, *, reuse_addr: bool, reuse_port: bool) -> socket.socket:
        """A socket to which the kernel may give this port alone."""
        made = socket.socket(family)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse_addr)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse_port)
        try:
            made.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, (port << 16 | port).to_bytes(4, sys.byteorder))
        except OSError:
            made.close()
            pytest.skip("this kernel cannot limit the ports that it gives to one socket")
        return made

    def taken(act: str, target: tuple[str, int], family: int, **options: bool) -> socket.socket:
        made = limited(family, **options)
        try:
            made.bind(target) if act == "bind" else made.connect(target)
        except OSError:
            made.close()
            raise
        assert made.getsockname()[1] == port
        return made

    def ways() -> dict[str, bool]:
        found: dict[str, bool] = {}
        families = (
            [(V4, "", "127.0.0.1"), (V6, "::", "::1")] if socket.has_dualstack_ipv6() else [(V4, "", "127.0.0.1")]
        )
        for family, everywhere, here in families:
            with listener(0, here, family) as peer:
                targets = [("bind", (everywhere, 0)), ("bind", (here, 0)), ("connect", peer.getsockname()[:2])]
                for act, target in targets:
                    for options in ({}, {"reuse_addr": True}, {"reuse_port": True}):
                        given = {"reuse_addr": False, "reuse_port": False, **options}
                        name = f"{act} {target} {options}"
                        found[name] = can(lambda: taken(act, target, family, **given))  # noqa: B023
        return found

    with holder() as held:
        assert held.hold("job-1", "a", 1) == [port]
        assert not any(ways().values()), ways()
        with listener(port, "127.0.0.1"):
            assert not any(ways().values()), ways()
    assert can(lambda: taken("bind", ("", 0), V4, reuse_addr=False, reuse_port=False)), "the test shows nothing"


def test_other_listeners_of_the_runtime_leave_held_ports_alone(block: range) -> None:
    """ZeroMQ and `create_server` set SO_REUSEADDR: they could take a port of the range that is held for a worker."""
    with holder() as held:
        kept = held.hold("job-1", "a", 8)
        listeners = [
            bind_free(lambda port: socket.create_server(("127.0.0.1", port))),
            bind_free(lambda port: socket.create_server(("", port))),
        ]
        try:
            assert {each.getsockname()[1] for each in listeners} == set(block) - set(kept)
            with pytest.raises(UsageError, match="no port of UNIFIED_PORT_RANGE"):
                bind_free(lambda port: socket.create_server(("127.0.0.1", port)))
        finally:
            for each in listeners:
                each.close()


def test_a_port_with_connections_in_time_wait_is_good_for_the_runtime(of_the_kernel: int) -> None:
    with socket.create_server(("127.0.0.1", of_the_kernel)) as server:
        client = socket.create_connection(server.getsockname())
        server.accept()[0].close()
        assert client.recv(1) == b""
        client.close()
    assert not is_free(of_the_kernel), "no connection is in TIME_WAIT: the test shows nothing"
    bind_free(lambda port: socket.create_server(("127.0.0.1", port))).close()


def test_ports_are_released_a_while_after_the_job_has_left(block: range) -> None:
    with holder() as held:
        ports = held.hold(W0.job_id, W0.worker, 2) + held.hold(W1.job_id, W1.worker, 1)
        others = held.hold("job-2", "a", 1)
        other = JobWorkerIncarnation("job-2", "a", 4)
        held.keep(100.0, lambda: [W1, other])
        held.keep(200.0, lambda: [other])  # the job leaves
        held.keep(200.0 + LINGER_S - 1, lambda: [other])
        held.keep(210.0 + LINGER_S, lambda: [W0, other])  # and comes back
        held.keep(300.0 + LINGER_S, lambda: [other])
        held.keep(300.0 + 2 * LINGER_S - 1, lambda: [other])
        assert not any(is_free(port) for port in ports)
        held.keep(300.0 + 2 * LINGER_S, lambda: [other])
        assert all(is_free(port) for port in ports)
        assert not is_free(others[0])
        assert held.hold(W1.job_id, W1.worker, 0) == []
    assert is_free(others[0])


def test_no_process_inherits_the_sockets(block: range) -> None:
    with holder() as held:
        (port,) = held.hold("job-1", "a", 1)
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False) as child:
            held.close()
            try:
                assert is_free(port)
            finally:
                child.kill()


def start(role: RoleSpec, rank: int = 0) -> StartWorker:
    desired = DesiredWorker(job_id="job-1", name=role.worker(rank), worker_incarnation=0, kind="worker", role=role.name)
    return start_of(desired, JobSpec(name="job", roles=[role]), FACTS, num_neighbours=1, relay="", directory=[])


def test_a_start_has_the_ports_that_its_role_names(block: range) -> None:
    entry = EntryPoint(kind="script", target="serve.py", argv=["--port", "{port1}"])
    role = RoleSpec(name="w", kind="simple", entry_point=entry, total=2, envs={"URL": "http://h:{port}", "A": "{}"})
    with holder() as held:
        ports = held.hold("job-1", role.worker(0), 1)
        launch = held.given(start(role)).launch
        assert launch.ports == held.hold("job-1", role.worker(0), 2)
        assert launch.ports[:1] == ports
        assert launch.spec.role("w") == role, "the worker itself puts the numbers into the texts"
        plain = structs.replace(role, entry_point=EntryPoint(kind="attribute", target="m", attribute="f"), envs={})
        assert held.given(start(plain, 1)).launch.ports == []
        assert held.given(start(plain)).launch.ports == launch.ports, "those of earlier incarnations"
        store = structs.replace(start(plain), launch=structs.replace(launch, kind="store", role="", ports=[]))
        assert held.given(store) == store
        read_at_start = structs.replace(role, envs={"TORCH_X": "{port}"})
        assert held.given(start(read_at_start)).env == {"TORCH_X": str(launch.ports[0])}
        with pytest.raises(UsageError, match=r"\{port64\} is no port of a worker"):
            held.given(start(structs.replace(role, envs={"A": "{port64}"})))


def test_a_lack_of_descriptors_is_the_reason(block: range, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with holder() as held:
        monkeypatch.setattr("unified_agent.ports.socket.socket", none)
        assert held.answer(HoldPorts(W0, 1)) == PortsHeld(num=1, error="[Errno 24] Too many open files")
        monkeypatch.undo()


def test_sockets_of_a_request_that_fails_are_closed(block: range) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with holder() as held, pytest.raises(UsageError):
        held.hold("job-1", "a", 11)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_ports_use_no_more_than_half_of_the_agents_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (10, 10))
    with holder() as held:
        first = held.hold("job-1", "w0", 3)
        with pytest.raises(UsageError, match=r"node n1 holds no more ports: .* half of its agent's open files .*-n 10"):
            held.hold("job-1", "w1", 3)
        assert len(held.hold("job-1", "w1", 2)) == 2
        assert held.hold("job-1", "w0", 3) == first
