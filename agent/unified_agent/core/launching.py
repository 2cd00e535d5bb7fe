"""The start of a worker: its job's description, and its first message: identity, placement, devices, peers."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from unified.job.spec import JobSpec
from unified.protocol.agent_master import DesiredWorker, DesiredWorkers
from unified.protocol.records import DirectoryEntry, JobWorkerIncarnation
from unified.protocol.worker_agent import Launch
from unified_agent.core.messages import StartWorker
from unified_agent.core.step import AgentStep
from unified_agent.environment import NodeFacts, devices_of, log_path, starting_variables, worker_environment, zygote_of


class JobSpecs:
    """Descriptions of the jobs that have workers here. The master sends each of them once."""

    def __init__(self) -> None:
        self._specs: dict[str, JobSpec] = {}

    def take(self, step: AgentStep, message: DesiredWorkers) -> bool:
        """Take in the jobs of a desired set, and forget all others. False if a description was lost on the way: then
        nothing changes. The master gets no report of the generation, and sends the whole set again."""
        known = self._specs | {job.job_id: job.spec for job in message.jobs if job.spec is not None}
        lacking = [job.job_id for job in message.jobs if job.job_id not in known]
        if lacking:
            text = f"generation {message.generation} came without the description of {', '.join(lacking)}"
            step.report("desired-ignored", text, level="warning")
            return False
        self._specs = {job.job_id: known[job.job_id] for job in message.jobs}
        return True

    def of(self, wanted: DesiredWorker) -> JobSpec | None:
        """Return the description of a worker's job; None if it has none, or lacks the worker's role."""
        spec = self._specs.get(wanted.job_id)
        if spec is None or wanted.kind == "store":
            return spec
        try:
            spec.role(wanted.role)
        except KeyError:
            return None
        return spec

    @property
    def job_ids(self) -> Collection[str]:
        return self._specs.keys()

    def __iter__(self) -> Iterator[JobSpec]:
        return iter(self._specs.values())


def start_of(
    wanted: DesiredWorker,
    spec: JobSpec,
    node: NodeFacts,
    *,
    num_neighbours: int,
    num_elsewhere: int = 0,
    relay: str,
    directory: list[DirectoryEntry],
) -> StartWorker:
    """Return the order to start a worker, with everything that it needs.

    Args:
        num_neighbours: workers that are desired on this node, itself included.
        num_elsewhere: workers of other agents of this host.
    """
    launch = Launch(
        job_id=wanted.job_id,
        spec=spec,
        kind=wanted.kind,
        name=wanted.name,
        incarnation=wanted.worker_incarnation,
        role=wanted.role,
        place=wanted.place,
        node=node.node,
        host_id=node.host_id,
        address=node.address,
        master=node.master,
        relay=relay,
        run_dir=node.run_dir,
        log_file=log_path(node.log_dir, wanted.job_id, wanted.name, wanted.worker_incarnation, "err"),
        devices=devices_of(spec, wanted.devices, node),
        env=worker_environment(
            spec,
            wanted,
            node,
            num_local_workers=num_neighbours,
            num_host_workers=num_neighbours + num_elsewhere,
        ),
        directory=directory,
    )
    envs = spec.role(wanted.role).envs if wanted.kind == "worker" else {}
    zygote = zygote_of(spec, node)
    env = starting_variables(envs, {**node.inherited, **dict(zygote.env)})
    return StartWorker(
        incarnation=JobWorkerIncarnation(wanted.job_id, wanted.name, wanted.worker_incarnation),
        launch=launch,
        zygote=zygote,
        is_fresh=spec.start_method == "spawn" or bool(env),
        env=env,
    )
