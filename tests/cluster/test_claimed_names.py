"""Names in a real cluster: one holder, a second claimant that is refused, clients that wait, and the holder's death."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster
from unified.client.handle import JobHandle
from unified.job.spec import EntryPoint, JobSpec, Resources, RoleSpec
from unified.protocol.client_master import Explain, Story
from unified.protocol.records import Stage
from unified.testing import eventually

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("without_torch")]

CODE = '''
import sys
import time

from unified.api.runtime.worker import current_worker
from unified.errors import UsageError

def say(*words):
    sys.stdout.write(" ".join(map(str, (time.monotonic(), *words))) + "\\n")  # at once: two threads say something
    sys.stdout.flush()

def pause():
    while not current_worker().should_stop:
        time.sleep(0.01)

def own():
    """The first of its role holds the queue; the other wants it as well."""
    me = current_worker()
    if me.actor_info.rank == 0:
        me.names.find("the client waits", 20)
        me.names.claim("queue")
        say("holds as", me.incarnation)
    else:
        holder = me.names.find("queue", 20)
        try:
            me.names.claim("queue")
        except UsageError as error:
            say("refused:", error)
    pause()

def use():
    """A client that is there before the queue's owner."""
    me = current_worker()
    me.names.on_change(lambda name, holder: say("change", name, holder and tuple(holder)))
    me.names.claim("the client waits")
    say("found", me.names.find("queue", 20))
    pause()
'''


def job(folder: Path) -> JobSpec:
    (folder / "names_of_test.py").write_text(CODE)
    roles = [
        RoleSpec(
            name=name,
            kind="simple",
            restart_alone=True,
            entry_point=EntryPoint(kind="attribute", target="names_of_test", attribute=function),
            total=total,
            resources=Resources(accelerator=1.0),
        )
        for name, function, total in (("owner", "own", 2), ("client", "use", 1))
    ]
    return JobSpec(
        name="names",
        roles=roles,
        node_num=2,
        device_per_node=2,
        accelerator_type="CPU",
        sys_path=[str(folder)],
        working_dir=str(folder),
        stop_grace_s=2.0,
    )


def said(handle: JobHandle, text: str) -> float:
    """When a worker said this, on the clock that all processes of the machine share."""
    pattern = re.compile(r"\[(.*?)\] ([\d.]+) " + re.escape(text))

    def find() -> float:
        assert handle.status().stage != Stage.STOPPED, handle.status().reason
        return next((float(found[2]) for line in handle.logs() if (found := pattern.match(line))), 0.0)

    return eventually(find, timeout=100, message=f"nobody said {text!r}")


@pytest.mark.slow
def test_a_name_has_one_holder_and_its_next_incarnation_holds_it_again(local_cluster: Cluster, tmp_path: Path) -> None:
    cluster = local_cluster(nodes=2, devices=2)
    handle = cluster.submit(job(tmp_path))
    said(handle, "holds as 0")
    said(handle, "found owner_2-0_1-0")
    refused = (
        f"refused: worker owner_2-1_1-0 cannot claim the name 'queue' in job {handle.job_id}: it is held by worker"
    )
    said(handle, refused)
    killed_at = time.monotonic()
    os.kill(cluster.workers(handle)["owner_2-0_1-0"], signal.SIGKILL)
    lost_at = said(handle, "change queue None")
    assert lost_at > killed_at
    assert said(handle, "change queue ('owner_2-0_1-0', 1)") > lost_at
    said(handle, "holds as 1")
    story = cluster.connection.ask(Explain(job=handle.job_id), Story)
    events = [event.event for event in story.events]
    assert (events.count("name-claimed"), events.count("name-refused")) == (3, 1)
    handle.stop()
    assert handle.wait(timeout=200) == 130
