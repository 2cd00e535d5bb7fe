"""Calls to a running job from its driver and from the command line."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import unified
from tests.cluster.conftest import Cluster, Project
from tests.support.deadlines import missed
from unified.api.builder import DLJobBuilder
from unified.bus.streams.stream import RpcStream
from unified.cli.main import main
from unified.client.handle import JobHandle
from unified.errors import (
    MasterUnreachableError,
    RefusedError,
    RpcNotFoundError,
    RpcTimeoutError,
    UsageError,
    WorkerDiedError,
)
from unified.security.curve import new_key
from unified.security.keys import write_key
from unified.testing import Belongings, left_behind

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("without_torch")]

SERVICE = """
import os, threading
import numpy as np
from unified import current_worker, rpc
from unified.bus.calls.inbound import current_call

class Service:
    def __init__(self):
        self.rate = 0.5
        self.stopped = threading.Event()

    @rpc()
    def rank(self):
        return current_worker().actor_info.rank

    @rpc()
    def set_rate(self, rate, *, scale=1):
        self.rate, old = rate * scale, self.rate
        return {"old": old, "new": self.rate, "caller": current_call().worker}

    @rpc()
    def array(self, size):
        return np.arange(size, dtype=np.float32)

    @rpc()
    def count(self, to):
        yield from range(to)

    @rpc()
    def fail(self):
        raise KeyError("no such weight")

    @rpc()
    def thing(self):
        return Service

    @rpc()
    def hang(self):
        self.stopped.wait(100)

    @rpc()
    def die(self):
        os._exit(7)

    @rpc()
    def stop(self):
        self.stopped.set()

def drive():
    current_worker().on_stop(lambda: None)
    threading.Event().wait()
"""


@pytest.fixture
def handle(
    local_cluster: Cluster, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[JobHandle]:
    write_key(tmp_path / "cluster.key", new_key())
    monkeypatch.setenv("UNIFIED_KEY_FILE", str(tmp_path / "cluster.key"))
    project(outside_service=SERVICE)
    builder = DLJobBuilder().node_num(1).device_per_node(4).device_type("CPU")
    builder.workload("driver", "outside_service.drive").resource(cpu=0.1)
    builder.workload("service", "outside_service.Service").total(2).resource(cpu=0.1).not_driver()
    with local_cluster(nodes=1, devices=4).submit(builder.build(), "outside", stop_grace_s=1) as handle:
        yield handle


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def command(handle: JobHandle, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def run(*words: str) -> Ran:
        capsys.readouterr()
        code = main(["call", "outside", *words, "--master", handle.connection.address])
        return Ran(code, *capsys.readouterr())

    return run


def test_calls_from_the_driver_and_from_the_command_line(handle: JobHandle, command: Callable[..., Ran]) -> None:
    from_the_driver(handle)
    from_the_command_line(command)
    from_a_client(handle)
    deaths_and_ends(handle)


def from_the_driver(handle: JobHandle) -> None:
    assert handle.call("service-1", "rank").result(100) == 1  # the first waits until the job is up
    group = handle.group("service")
    assert repr(group[0]) == f"OutsideWorker({group[0].name!r})"
    assert group[0] != handle.group("service")[0], "each is itself alone"
    assert group.call("rank").result(100) == [0, 1]
    assert group.call_rank0("rank").result(100) == 0
    assert [worker.call("rank").result(100) for worker in group] == [0, 1]
    changed = handle.call("service-0", "set_rate", 0.25, scale=2).result(100)
    assert (changed["old"], changed["new"]) == (0.5, 0.5)
    assert changed["caller"].startswith("outside:")
    np.testing.assert_array_equal(handle.call("service-0", "array", 100_000).result(100), np.arange(100_000))
    stream = handle.call("service-0", "count", 40).result(100)
    assert isinstance(stream, RpcStream)
    assert list(stream) == list(range(40))
    with pytest.raises(KeyError, match="no such weight"):
        handle.call("service-0", "fail").result(100)
    with pytest.raises(RpcNotFoundError, match=r"no rpc method 'rnak'\. Did you mean 'rank'\?"):
        handle.call("service-0", "rnak").result(100)
    with pytest.raises(RpcTimeoutError):
        handle.call("service-0", "hang", _timeout=missed(0.2)).result(100)
    with pytest.raises(UsageError, match=r"has no role 'sevice'\. Did you mean 'service'\?"):
        handle.group("sevice")
    with pytest.raises(UsageError, match=r"has no worker 'service-2'\. Role service has ranks 0 to 1\."):
        handle.call("service-2", "rank")
    with pytest.raises(UsageError, match=f"role service of job {handle.job_id} has 2 workers: name one"):
        handle.call("service", "rank")


def from_the_command_line(command: Callable[..., Ran]) -> None:
    assert command("service", "rank") == (0, "[0,1]\n", "")
    assert command("service-1", "array", "3").out == "[0.0,1.0,2.0]\n"
    assert command("service-1", "count", "3").out == "0\n1\n2\n"
    assert '"new":6' in command("service-1", "set_rate", "3", "scale=2").out
    failed = command("service-0", "fail")
    assert failed.code == 1
    assert "KeyError: 'no such weight'" in failed.err
    assert 'raise KeyError("no such weight")' in failed.err
    for words, code, message in (
        (["service-0", "rnak"], 2, "Did you mean 'rank'?"),
        (["sevice", "rank"], 2, "has no worker 'sevice'. Did you mean 'service'?"),
        (["service-0", "set_rate", "half"], 2, "have to be JSON, and 'half' is not"),
        (["service-0", "thing"], 1, "it holds a Python object, but this program reads only plain data and arrays"),
        (["service-0", "hang", "--timeout", "0.5"], 1, "did not answer"),
    ):
        ran = command(*words)
        assert (ran.code, ran.out) == (code, "")
        assert message in ran.err
        assert "Traceback" not in ran.err


def from_a_client(handle: JobHandle) -> None:
    address, before = handle.connection.address, Belongings()
    with unified.connect(address) as client:
        assert [(job.job_id, job.stage) for job in client.jobs()] == [(handle.job_id, "RUNNING")]
        job = client.job("outside")
        assert job.job_id == handle.job_id
        assert job.call("service-1", "rank").result(100) == 1
        assert job.group("service").call("rank").result(100) == [0, 1]
        assert {worker.role for worker in job.status().workers} == {"driver", "service"}
        assert any("event=rpc-handler-failed" in line for line in job.logs(role="service"))
        with pytest.raises(RefusedError, match="there is no job 'inside'"):
            client.job("inside")
        assert len(client.job(handle.job_id).group("service")) == 2
    assert left_behind(before, settle_s=60) == []
    with pytest.raises(UsageError, match=r"this ClusterClient was closed"):
        client.job("outside")
    with pytest.raises(MasterUnreachableError, match="closed"):
        job.call("service-1", "rank")


def deaths_and_ends(handle: JobHandle) -> None:
    handle.call("service-0", "stop").result(100)
    with pytest.raises(WorkerDiedError):
        handle.call("service-1", "die").result(100)
    assert handle.call("service-1", "rank").result(100) == 1  # its next incarnation
    handle.stop()
    handle.wait(100)
    with pytest.raises(RefusedError, match=f"job {handle.job_id} has ended with exit code 130: nobody is there"):
        handle.group("service")
