"""The process that keeps a job's rendezvous stores, so that the death of a rank does not take them away."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from unified.protocol.worker_agent import Failed, Hello, Launch
from unified.worker.control import ControlChannel, Handlers
from unified.worker.environment import variables
from unified.worker.exit import leave
from unified.worker.failure import describe
from unified.worker.rendezvous_store import RoundStores


def serve_stores(channel: ControlChannel, launch: Launch) -> NoReturn:
    """Open the job's store, say where it is, and open one for each round until the agent says stop.

    It keeps nothing that would be worth an orderly end: a stop ends it at once, and so does the agent's death.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    channel.start(
        Handlers(on_run=lambda order: None, on_directory=lambda entries: None, on_stop=lambda stop: os._exit(0))
    )
    os.environ.update(variables(launch))  # before torch resolves its first name
    try:
        ports = {role.name: role.communication.port for role in launch.spec.roles}
        stores = RoundStores(launch.address, ports)
        channel.send(Hello(pid=os.getpid(), store_port=stores.port))
        while True:
            stores.serve_one()
    except Exception as error:
        print(f"unified: the store host of job {launch.job_id} cannot go on: {error!r}", file=sys.stderr)
        category = "setup" if isinstance(error, ImportError) else "crash"
        channel.send(Failed(failure=describe(error, category=category)))
        leave(1)
