"""A cluster of the gateway's that is held in memory: what the tests of its rules and routes share."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from unified.client.reports import KeptReports
from unified.errors import MasterUnreachableError
from unified.protocol.records import WorkerReport
from unified_gateway.backend import NameTakenError, RunEvent, RunPlan, RunRecord


class MemoryBackend:
    """Attempts in a list. Submissions are decided as a master decides them; `calls` counts what is asked."""

    name = "memory"
    default_namespace = "default"

    def __init__(self) -> None:
        self.attempts: list[RunRecord] = []
        self.plans: list[RunPlan] = []
        self.calls: list[str] = []
        self.is_away = False
        self.is_closed = False
        self.lines: list[str] = []
        self.more = asyncio.Event()
        """Set when followers of logs have come to the end."""

    def end(self, name: str, exit_code: int = 1, detail: str = "ValueError: boom") -> None:
        """End the newest attempt of a name."""
        at, run = next((at, run) for at, run in enumerate(self.attempts) if run.name == name and not run.is_ended)
        status: Any = "failed" if exit_code else "succeeded"
        self.attempts[at] = replace(run, status=status, exit_code=exit_code, detail=detail if exit_code else "")

    async def submit(self, plan: RunPlan, *, follows: str) -> str:
        await self._call("submit")
        newest = self._newest(name=plan.name)
        if (newest.job_id if newest else "") != follows or (newest and not newest.is_ended):
            raise NameTakenError("another is there")
        living = [run for run in self.attempts if run.run_id == plan.request.run_id and not run.is_ended]
        if living:
            raise NameTakenError("another has this run id")
        number = len(self.attempts) + 1
        run = RunRecord(
            name=plan.name,
            namespace="default",
            run_id=plan.request.run_id,
            framework=plan.request.framework,
            status="submitted",
            job_id=f"{plan.name}-{number}",
            submitted_at=1000.0 + number,
            labels=plan.request.labels,
            annotations=plan.annotations,
        )
        self.attempts.append(run)
        self.plans.append(plan)
        return run.job_id

    async def get(self, name: str) -> RunRecord | None:
        await self._call("get")
        return self._newest(name=name)

    async def find_run(self, run_id: str) -> RunRecord | None:
        await self._call("find_run")
        return self._newest(run_id=run_id)

    async def runs(self) -> list[RunRecord]:
        await self._call("runs")
        return [replace(run, annotations={}) for run in reversed(self.attempts)]

    async def stop(self, name: str, *, force: bool) -> None:
        await self._call("stop")
        run = self._newest(name=name)
        if run is not None and not run.is_ended:
            self.end(name, 130, "stopped")

    async def logs(self, name: str, *, rank: int | None, follow: bool, tail_bytes: int | None) -> AsyncIterator[str]:
        for line in self.lines:
            await asyncio.sleep(0)
            yield line
        if follow:
            await self.more.wait()
            if self.is_away:
                raise MasterUnreachableError("no master answers")

    async def events(self, name: str, *, limit: int) -> list[RunEvent]:
        return [RunEvent(at=1.0, event="job-submitted", reason="so")]

    async def metrics(self, name: str, *, since: float, limit: int) -> KeptReports:
        return KeptReports([WorkerReport(at=2.0, step=1, total=3, metrics={"loss": 0.5})], [])

    def describe(self, plan: RunPlan) -> dict[str, Any]:
        return {"name": plan.name}

    async def close(self) -> None:
        self.is_closed = True

    def _newest(self, **fields: str) -> RunRecord | None:
        found = [run for run in self.attempts if all(getattr(run, name) == each for name, each in fields.items())]
        return found[-1] if found else None

    async def _call(self, what: str) -> None:
        self.calls.append(what)
        await asyncio.sleep(0)  # others may come between
        if self.is_away:
            raise MasterUnreachableError("no master answers")
