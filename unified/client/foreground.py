"""A job in the foreground: where to look, progress and output while it runs, last words when it has ended."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from unified.client.display import open_display
from unified.client.handle import JobHandle
from unified.client.output import Prefix
from unified.client.report import end_lines
from unified.client.terminal import lasting, printable
from unified.client.watch import Watch
from unified.errors import UnifiedError
from unified.job.spec import JobSpec
from unified.protocol.client_master import Explain, Story
from unified.protocol.records import EventRecord


def run_in_foreground(handle: JobHandle, prefix: Prefix, spec: JobSpec) -> int:
    """Show a job until it has ended, close its handle, and return its exit code."""
    cluster = handle.cluster
    watch: Watch | None = None
    try:
        with open_display(prefix=prefix) as display:
            display.note(_where(handle))
            files = {role.name: role.output_files for role in spec.roles if role.output_files is not None}
            for found in files.values():
                if found.is_written:
                    display.note(f"{handle.job_id}  files of what ranks print: {found.log_dir}/{found.run_id}")
            watch = Watch(
                handle.connection,
                handle.job_id,
                display,
                files=files,
                problem=lambda: cluster.problem if cluster is not None else None,
            )
            status = watch.run()
            story = _keep_story(handle, cluster.home) if cluster is not None else _explain_command(handle)
        err = lasting(sys.stderr)
        lines = end_lines(status, story=story)
        err.write("".join(f"{printable(line) if err.isatty() else line}\n" for line in lines))
        err.flush()
    except SystemExit:  # the second Ctrl-C or SIGTERM: there is no time for grace
        if cluster is not None:
            cluster.stop(timeout_s=0.0)
        raise
    finally:
        handle.close()
        if watch is not None:
            watch.join()
    return watch.exit_code


def _where(handle: JobHandle) -> str:
    if handle.cluster is not None:
        nodes, devices = len(handle.cluster.node_names), handle.cluster.devices_per_node
        return (
            f"{handle.job_id}  embedded cluster at {handle.connection.address}: {nodes} "
            f"node{'s' if nodes != 1 else ''} of {devices} device{'s' if devices != 1 else ''}; logs: "
            f"{handle.cluster.home}"
        )
    return f"{handle.job_id}  submitted to {handle.connection.address}; from elsewhere: unified status {handle.job_id}"


def _explain_command(handle: JobHandle) -> str:
    return f"unified explain {handle.job_id} --master {handle.connection.address}"


def _keep_story(handle: JobHandle, home: Path) -> str:
    """Write down why things happened, because the embedded master that knows it is about to end."""
    path = home / f"explain-{handle.job_id}.txt"
    try:
        story = handle.connection.ask(Explain(job=handle.job_id), Story)
        path.write_text("".join(f"{event_text(event)}\n" for event in story.events))
    except (UnifiedError, OSError):
        return f"the daemons' logs in {home}"
    return f"less {path}"


def event_text(event: EventRecord) -> str:
    """``07:49:42.120  worker-failed  trainer_2-0_2-0  killed by SIGKILL``."""
    moment = time.strftime("%H:%M:%S", time.localtime(event.at)) + f".{int(event.at % 1 * 1000):03}"
    who = event.worker or event.role or event.node or event.job
    return f"{moment}  {event.event:<20}  {who:<24}  {event.reason}".rstrip()
