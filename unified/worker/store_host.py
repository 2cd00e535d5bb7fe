"""Process of a job's store host. It has the rendezvous stores, so that no store dies with a rank."""

from __future__ import annotations

import os
import select
import signal
import sys
from typing import NoReturn

from unified.errors import EntryPointError
from unified.job.spec import LOOPBACK, is_on_one_host
from unified.protocol.worker_agent import Failed, Hello, Launch
from unified.rounds.rendezvous_store import RoundStores, listen, needs_no_torch, require_torch
from unified.worker.control import ControlChannel, Handlers
from unified.worker.environment import variables
from unified.worker.exit import exit_process
from unified.worker.failure import describe


def serve_stores(channel: ControlChannel, launch: Launch) -> NoReturn:
    """Open the job's store, report its port, and open a store for each round until the agent says stop.

    The process needs no orderly end: a stop ends it at once, and so does the agent's death. It ignores SIGTERM: where
    every process gets it, as from SLURM, workers still save together.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel.start(
        Handlers(on_run=lambda order: None, on_directory=lambda entries: None, on_stop=lambda stop: os._exit(0))
    )
    os.environ.update(variables(launch))  # before torch resolves its first name
    try:
        ports = {role.name: role.communication.port for role in launch.spec.roles}
        address = LOOPBACK if is_on_one_host(launch.spec) else launch.address
        listener = listen(address, 0)
        channel.send(Hello(pid=os.getpid(), store_port=listener.getsockname()[1]))
        if needs_no_torch():
            select.select([listener], [], [])  # mostly no client comes, and torch is not imported
        require_torch(", ".join(role.name for role in launch.spec.roles if role.kind == "elastic"))
        stores = RoundStores(address, ports, listener)
        while True:
            stores.serve_one()
    except Exception as error:
        print(f"unified: the store host of job {launch.job_id} cannot go on: {error!r}", file=sys.stderr)
        category = "setup" if isinstance(error, EntryPointError) else "crash"
        channel.send(Failed(failure=describe(error, category=category)))
        exit_process(1)
