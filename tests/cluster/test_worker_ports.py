"""Ports of workers in a real cluster: the same after a kill, of one worker each, in commands, and free at the end."""

import contextlib
import errno
import http.client
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster, Project, lines
from unified.api.builder import DLJobBuilder
from unified.client.handle import JobHandle
from unified.testing import LocalCluster, eventually

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("without_torch")]

CODE = """
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unified import current_worker, rpc

class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open
    def do_GET(self):
        text = f"{current_worker().actor_info.name} {current_worker().incarnation}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

class Server:
    def __init__(self):
        places = zip(("", "127.0.0.1"), current_worker().ports(2))
        self.servers = [ThreadingHTTPServer(place, Answers) for place in places]
        for server in self.servers:
            threading.Thread(target=server.serve_forever, daemon=True).start()

    @rpc()
    def ports(self, num):
        return current_worker().ports(num)
"""
SCRIPT = """
import os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from unified import current_worker
HTTPServer(("", int(sys.argv[1])), BaseHTTPRequestHandler)
HTTPServer(("", int(os.environ["SECOND"])), BaseHTTPRequestHandler)
with open("said", "a") as file:
    print(*sys.argv[1:], os.environ["SECOND"], current_worker().ports(2), flush=True, file=file)
"""


def builder() -> DLJobBuilder:
    return DLJobBuilder().node_num(2).device_per_node(4).device_type("CPU")


def is_held(port: int) -> bool:
    """Is the port held at all addresses? A connection in TIME_WAIT has another address."""
    with socket.socket() as other:
        try:
            other.bind(("127.255.255.254", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return True
    return False


@contextlib.contextmanager
def served(*ports: int) -> Iterator[list[str]]:
    """The answers of servers, to which connections are open."""
    with contextlib.ExitStack() as stack:
        answers = []
        for port in ports:
            client = stack.enter_context(contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=100)))
            client.request("GET", "/")
            answers.append(client.getresponse().read().decode())
        yield answers


def ports(handle: JobHandle, worker: str, num: int) -> list[int]:
    return list(handle.call(worker, "ports", num).result(100))


@pytest.fixture
def cluster(local_cluster: Cluster, project: Project) -> LocalCluster:
    project(ported=CODE)
    return local_cluster(nodes=2, devices=4)


@pytest.mark.smoke
def test_a_server_has_its_ports_again_after_it_was_killed(cluster: LocalCluster) -> None:
    job = builder().workload("server", "ported.Server").total(2).resource(accelerator=3)  # on two nodes of one host
    with cluster.submit(job.build(), "served", stop_grace_s=2) as handle:
        ours, others = ports(handle, "server-0", 3), ports(handle, "server-1", 2)
        assert len({*ours, *others}) == 5
        assert ports(handle, "server-0", 2) == ours[:2]
        name = handle.group("server")[0].name
        with served(*ours[:2]) as answers:
            assert answers == [f"{name} 0"] * 2
            os.kill(cluster.workers(handle)[name], signal.SIGKILL)
            eventually(lambda: handle.status().workers[0].incarnation == 1, timeout=100)
        assert ports(handle, "server-0", 4)[:3] == ours
        with served(*ours[:2]) as answers:
            assert answers == [f"{name} 1"] * 2
        assert ports(handle, "server-1", 2) == others
        handle.stop()
        handle.wait(100)
    cluster.stop()
    assert not any(map(is_held, (*ours, *others)))


def test_commands_and_variables_have_the_numbers(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "serve.py").write_text(SCRIPT)
    job = builder().workload("script", "serve.py {port} --json={'a':{port1}}").env({"SECOND": "{port1}"})
    job = job.resource(accelerator=1).workload("program", "--no-python sh -c 'echo {port} ${port} >> echoed' {port0}")
    handle = cluster.submit(job.resource(accelerator=1).build(), "commands", working_dir=str(tmp_path))
    assert handle.wait(100) == 0, handle.status().reason
    (said,) = lines(tmp_path, "said")
    first, json, second, *both = said.split(maxsplit=3)
    assert (json, both) == (f"--json={{a:{second}}}", [f"[{first}, {second}]"])
    (echoed,) = lines(tmp_path, "echoed")
    assert echoed.isdecimal(), "a variable of the shell stays one, and is empty here"
    assert echoed not in (first, second)


def test_a_start_fails_with_the_reason_if_no_port_is_free(local_cluster: Cluster, project: Project) -> None:
    project(ported="def run(): pass")
    first = next(first for first in range(1100 + os.getpid() % 10_000, 30_000) if not is_held(first))
    cluster = local_cluster(nodes=1, devices=1, env={"UNIFIED_PORT_RANGE": f"{first}-{first + 20}"})
    job = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU").workload("server", "ported.run")
    job = job.env({"LAST": "{port40}"}).resource(cpu=0.1).max_restart(0)
    handle = cluster.submit(job.build(), "many")
    assert handle.wait(100) == 1
    end = handle.status().end
    assert end is not None
    assert end.failure.summary.startswith("could not be started: node node-1 has not 41 more ports for worker server_")
    assert f"of {first} to {first + 20} are free. Give its agent a wider UNIFIED_PORT_RANGE." in end.failure.summary


@pytest.mark.slow
def test_ports_are_free_again_while_the_agent_goes_on(cluster: LocalCluster) -> None:
    job = builder().workload("server", "ported.Server").resource(accelerator=1)
    with cluster.submit(job.build(), "left", stop_grace_s=2) as handle:
        held = ports(handle, "server-0", 3)
        handle.stop()
        handle.wait(100)
    assert all(map(is_held, held)), "a restart could still be due"
    eventually(lambda: not any(map(is_held, held)), timeout=110, message="the ports of a job that has ended are held")
