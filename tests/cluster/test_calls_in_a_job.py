"""Streams, deadlines and retries between the roles of a job, on real daemons."""

import pytest

from tests.cluster.conftest import Cluster, Project
from tests.support.deadlines import missed
from unified.api.builder import DLJob, DLJobBuilder

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("without_torch")]


SERVICE = '''
import asyncio, os, resource, time
import numpy as np
from unified import current_worker, export_rpc_instance, rpc, shared_empty

class Letters:
    """Exported under a name of its own."""
    @rpc()
    def spell(self, word):
        yield from word

    @rpc()
    async def spell_async(self, word):
        for letter in word:
            await asyncio.sleep(0)
            yield letter

class Service:
    def __init__(self):
        self.closed = []
        export_rpc_instance("letters", Letters())

    @rpc()
    def tokens(self, number):
        try:
            for i in range(number):
                yield i
        finally:
            self.closed.append(number)

    @rpc()
    async def tokens_async(self, number):
        for i in range(number):
            yield i

    @rpc()
    def fail_after(self, number):
        yield from range(number)
        raise KeyError("after")

    @rpc()
    async def never(self):
        yield 0
        await asyncio.Event().wait()

    @rpc()
    def get_closed(self):
        return self.closed

    @rpc()
    def sleep(self, seconds):
        time.sleep(seconds)

    @rpc(idempotent=True)
    def fragile(self):
        worker = current_worker()
        if worker.actor_info.rank == 1 and worker.incarnation == 0:
            os._exit(3)
        return worker.incarnation

    @rpc()
    def make(self, nbytes):
        """Besides an array: how many pages had to be made anew for it."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        array = np.ones(nbytes, np.uint8)
        return array, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    @rpc()
    def make_shared(self):
        array = shared_empty(1 << 20, "uint8")
        array.fill(1)
        self.first = array[:1]
        return array

    @rpc()
    def change(self):
        self.first[0] = 9
'''

DRIVER = """
import asyncio, time
from service import Letters, Service
from unified import RoleGroup, create_rpc_proxy
from unified.errors import RemoteError, RpcTimeoutError, UsageError, WorkerDiedError

def streams():
    group = RoleGroup("service")
    for method in ("tokens", "tokens_async"):
        assert list(group[0].stream(method, 100)) == list(range(100))
        assert [list(each) for each in group.stream(method, 20)] == [list(range(20))] * 2
    with group[1].stream("tokens", 10_000) as tokens:
        assert [next(tokens) for _ in range(3)] == [0, 1, 2]
    deadline = time.monotonic() + 20
    while group[1].call("get_closed").result()[-1] != 10_000:
        assert time.monotonic() < deadline, "the generator was not closed"
        time.sleep(0.01)
    items = group[0].stream("fail_after", 2)
    assert [next(items), next(items)] == [0, 1]
    try:
        next(items)
    except KeyError as error:
        assert isinstance(error, RemoteError) and error.worker.startswith("service_"), error
    else:
        raise AssertionError("no error")
    letters = create_rpc_proxy("service-1", "letters", Letters)
    assert "".join(letters.spell("word")) == "word"

    async def spell():
        return [letter async for letter in letters.spell_async("word")]

    assert "".join(asyncio.run(spell())) == "word"

def deadlines():
    group = RoleGroup("service")
    for call in (
        lambda: group.call("sleep", 30).result(),  # the job's own
        lambda: group[0].call("sleep", 30, _timeout=0.1).result(),
        lambda: group.with_options(timeout=0.1).call_rank0("sleep", 30).result(),
        lambda: create_rpc_proxy("service", None, Service, timeout=0.1).sleep(30),
        lambda: list(group[0].stream("never", _timeout=0.1)),
    ):
        try:
            call()
        except RpcTimeoutError as error:
            assert "did not answer" in str(error), error
        else:
            raise AssertionError("no deadline")

def retries():
    group = RoleGroup("service")
    try:
        group.call("fragile").result()
    except WorkerDiedError as error:
        assert not error.is_final, error
    else:
        raise AssertionError("nobody died")
    assert group.call("fragile").result()[1] == 1  # waits for the next incarnation

def results():
    actor = RoleGroup("service")[0]
    faults = [actor.call("make", 64 << 20).result()[1] for _ in range(12)]
    # One that is asked for before the last was let go of takes memory of its own.
    assert sum(each > 16 for each in faults) <= 3, f"memory that was there is not used again: {faults}"
    array = actor.call("make_shared").result()
    assert array.sum() == 1 << 20
    actor.call("change").result()
    assert array[0] == 9, "it is a copy"

def retries_at_once():
    group = RoleGroup("service").with_options(retries=2, timeout=100)
    assert group.call("fragile").result()[1] == 1
    try:
        group.call(Service.get_closed)
    except UsageError as error:
        assert "not marked @rpc(idempotent=True)" in str(error), error
    else:
        raise AssertionError("it was retried")
"""


def job(function: str) -> DLJob:
    """A driver that runs this function, and two services."""
    builder = DLJobBuilder().node_num(2).device_per_node(2).device_type("CPU")
    builder.workload("driver", f"driver.{function}").resource(cpu=0.1)
    builder.workload("service", "service.Service").total(2).resource(cpu=0.1).not_driver().restart_alone()
    return builder.build()


@pytest.mark.parametrize(
    "function",
    ["streams", "retries", *(pytest.param(name, marks=pytest.mark.slow) for name in ("retries_at_once", "results"))],
)
def test_calls_of_every_kind(local_cluster: Cluster, project: Project, function: str) -> None:
    project(service=SERVICE, driver=DRIVER)
    handle = local_cluster(nodes=2, devices=2).submit(job(function), function.replace("_", "-"), stop_grace_s=1)
    assert handle.wait(timeout=200) == 0, handle.status().end


@pytest.mark.slow
def test_deadline_of_the_job_is_that_of_calls_that_name_none(local_cluster: Cluster, project: Project) -> None:
    project(service=SERVICE, driver=DRIVER)
    handle = local_cluster(nodes=1, devices=3).submit(
        job("deadlines"), "deadlines", call_timeout_s=missed(0.3), stop_grace_s=1
    )
    assert handle.wait(timeout=200) == 0, handle.status().end
