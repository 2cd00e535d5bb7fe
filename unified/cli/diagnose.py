"""``unified diagnose``: one archive about a job for a bug report, without secrets."""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import re
import sys
import tarfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from unified.cli.main import release
from unified.cli.options import add_job, add_master
from unified.cli.show import status_lines
from unified.client.connection import MasterConnection, connect_master
from unified.client.report import event_text
from unified.config.settings import for_user_alone
from unified.errors import ClusterError, MasterUnreachableError, RefusedError, UnifiedError, UsageError
from unified.protocol import client_master
from unified.protocol.client_master import ClientRequest, JobStatus, WorkerStatus
from unified.protocol.framing import PROTOCOL_VERSION
from unified.protocol.records import Stage, WorkerState

A = TypeVar("A")
MASTER = "the master"
MAX_WORKERS = 64
"""Number of workers whose logs are taken: first those that failed."""
TAIL_BYTES = 64 * 1024
MAX_EVENTS = 2000
STACKS_S = 5.0
WHOLE_S = 120.0
"""Seconds after which no further request is sent."""
SLOW_S = 5.0
"""Seconds: a node that took longer to refuse a log gets no further request."""
STREAMS = ("out", "err", "metrics")
LEFT_OUT = "(left out)"
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API[-_]?KEY|ACCESS[-_]?KEY|PRIVATE|AUTH", re.IGNORECASE)
_SECRET_TEXT = re.compile(
    # a name that begins a word, and what is between it and its value: `"name": "`, `name=`, `--name `, `'--name', '`
    r"(?P<name>(?<![\w.-])(?=(?P<option>--)?[\w.-]*?"
    r"(?:token(?!iz)|secret|passw(?:or)?d|credential|(?:api|access|private)[-_]?key))[\w.-]++\\*+[\"']?"
    r"(?:\s*+[=:]++>?|(?(option),?\s(?!\s*+\\*+[\"']?-)|(?!)))\s*+(?P<quote>\\*+[\"'])?+)"
    # the value: in quotes up to the closing quote, which has as many backslashes as the opening one
    r"(?(quote)(?:(?!(?P=quote))(?:\\++[\"']?|[^\n\\])){4,}+|(?:(?:bearer|basic)\s++)?+[^\s\"',;&]{4,}+)"
    r"|(?P<scheme>\b(?:bearer|basic)\s++)[\w.~+/=-]{8,}+"
    r"|(?P<user>://[^\s/:@]*+:)[^\s/@]++(?=@)"
    r"|(?<![\w-])(?:(?:hf_|gh[opsur]_|AKIA|ASIA)[a-z0-9]{16,}+|(?:sk-|github_pat_|glpat-|xox[abprs]-)[\w-]{20,}+)",
    re.IGNORECASE,
)
MIN_SECRET = 6
"""Least number of characters of a value that is searched for in texts."""


def diagnose_arguments(parser: ArgumentParser) -> None:
    add_job(parser)
    add_master(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="The archive (default: JOB-diagnosis.tar.gz)."
    )


def diagnose(job: str, master: str | None, output: Path | None) -> None:
    """Write one archive about a job for a bug report: its status, events, nodes, the ends of its logs, stacks, settings
    and releases. Values of variables and texts that look like secrets are left out; look through it all the same.
    It asks for two minutes at most, and says in each file what could not be had.
    """
    with connect_master(master) as connection:
        status = connection.ask(client_master.GetJob(job=job), JobStatus)
        path = output or Path(f"{status.job_id}-diagnosis.tar.gz")
        clean = cleaner(os.environ)
        try:
            with open(path, "xb", opener=for_user_alone) as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
                for name, read in _files(DiagnosisReader(connection), status):
                    _show_progress(name)
                    found = _or_reason(read)
                    text = clean(found) if isinstance(found, str) else _json(cleaned(msgspec.to_builtins(found), clean))
                    if text or not name.startswith("logs/"):
                        _add(archive, f"{status.job_id}/{name}", text)
        except FileExistsError:
            raise UsageError(f"{path} is there already: name another file with -o.") from None
        except BaseException as error:
            with contextlib.suppress(OSError):
                path.unlink()
            if isinstance(error, OSError):
                raise UsageError(f"cannot write {path}: {error.strerror}.") from None
            raise
        finally:
            _show_progress("")
    print(f"{path} has {path.stat().st_size // 1024 + 1} KiB. Look through it before you send it: tar -xzf {path}")


class DiagnosisReader:
    """Answers of a master for one archive, within one deadline. A master or node that was silent is not asked again."""

    def __init__(self, connection: MasterConnection) -> None:
        self._connection = connection
        self._ends_at = time.monotonic() + WHOLE_S
        self._silent: set[str] = set()

    def ask(self, message: ClientRequest, expected: type[A], *, node: str = "", more_s: float = 0.0) -> A:
        """Return the master's answer; `node`: the node that it asks in turn; `more_s`: seconds that this may take."""
        began = time.monotonic()
        if silent := self._silent & {MASTER, node}:
            raise ClusterError(f"{min(silent)} did not answer before")
        if began >= self._ends_at:
            raise ClusterError(f"the {WHOLE_S:g} s for the whole archive are over")
        timeout_s = min(self._connection.timeout_s + more_s, self._ends_at - began)
        try:
            return self._connection.ask(message, expected, timeout_s=timeout_s)
        except MasterUnreachableError:
            self._silent.add(MASTER)
            raise
        except RefusedError:
            if node and time.monotonic() - began > SLOW_S:
                self._silent.add(node)
            raise


def cleaner(env: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that leaves secrets out of a text: values of variables with a secret's name, also as JSON or
    Python writes them; values after such a name, an HTTP scheme or a user name; and known kinds of tokens.
    """
    secrets = [value.strip() for name, value in env.items() if _SECRET_NAME.search(name)]
    values = {
        form
        for value in secrets
        if len(value) >= MIN_SECRET
        for form in (value, json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1])
    }
    known = re.compile("|".join(re.escape(value) for value in sorted(values, key=len, reverse=True)) or r"(?!)")

    def replaced(found: re.Match[str]) -> str:
        return f"{found['name'] or found['scheme'] or found['user'] or ''}{LEFT_OUT}"

    return lambda text: _SECRET_TEXT.sub(replaced, known.sub(LEFT_OUT, text))


def cleaned(value: Any, clean: Callable[[str], str]) -> Any:
    """Return a plain value of JSON with its texts cleaned, and without the text of fields that have a secret's name."""
    match value:
        case str():
            return clean(value)
        case list():
            return [cleaned(each, clean) for each in value]
        case dict():
            return {
                clean(name): LEFT_OUT if isinstance(each, str) and _SECRET_NAME.search(name) else cleaned(each, clean)
                for name, each in value.items()
            }
    return value


def settings_text(env: Mapping[str, str]) -> str:
    """Return the variables that concern Unified, without the values of secrets."""
    ours = re.compile(r"(UNIFIED|DLROVER|TRAINER_API|NCCL|GLOO|TORCH|CUDA|SLURM|OMP)_")
    return "\n".join(
        f"{name}={LEFT_OUT if _SECRET_NAME.search(name) else value}"
        for name, value in sorted(env.items())
        if ours.match(name)
    )


def _files(reader: DiagnosisReader, status: JobStatus) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name of each file, and a function that returns its text or a value to write as JSON."""
    yield "status.json", lambda: status
    yield "status.txt", lambda: "\n".join(status_lines(status, time.time()))
    yield "releases.txt", _releases
    yield "settings.txt", lambda: settings_text(os.environ)
    events = client_master.Explain(job=status.job_id, limit=MAX_EVENTS)
    yield "events.txt", lambda: "\n".join(event_text(each) for each in reader.ask(events, client_master.Story).events)
    yield "nodes.json", lambda: reader.ask(client_master.ListNodes(), client_master.NodeList)
    if status.stage is Stage.RUNNING:
        stacks = client_master.GetStacks(job=status.job_id, wait_s=STACKS_S)
        yield "stacks.json", lambda: reader.ask(stacks, client_master.JobStacks, more_s=STACKS_S).report
    usual = (WorkerState.RUNNING, WorkerState.SERVING, WorkerState.FINISHED)
    odd_first = sorted(status.workers, key=lambda worker: (not worker.num_failures, worker.state in usual))
    for worker in odd_first[:MAX_WORKERS]:
        yield from _logs(reader, status.job_id, worker)


def _logs(reader: DiagnosisReader, job_id: str, worker: WorkerStatus) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the ends of the logs of a worker's last two incarnations. The earlier one may be on another node."""
    for incarnation in range(max(0, worker.incarnation - 1), worker.incarnation + 1):
        node = f"node {worker.node}" if incarnation == worker.incarnation else f"the earlier node of {worker.name}"
        for stream in STREAMS:
            place = {"job": job_id, "worker": worker.name, "incarnation": incarnation, "stream": stream}
            request = msgspec.convert({**place, "offset": -TAIL_BYTES, "max_bytes": TAIL_BYTES}, client_master.ReadLog)
            yield f"logs/{worker.name}/{incarnation}.{stream}", partial(_tail, reader, request, node)


def _tail(reader: DiagnosisReader, request: client_master.ReadLog, node: str) -> str:
    return reader.ask(request, client_master.LogChunk, node=node, more_s=SLOW_S).data.decode("utf-8", "replace")


def _or_reason(read: Callable[[], object]) -> object:
    try:
        return read()
    except UnifiedError as error:
        return f"(cannot be had: {error})\n"


def _show_progress(name: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{name}", end="", file=sys.stderr, flush=True)


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode()


def _releases() -> str:
    from importlib.metadata import PackageNotFoundError, version

    lines = [
        f"unified-runtime {release()}",
        f"protocol {PROTOCOL_VERSION}",
        f"python {sys.version}",
        platform.platform(),
    ]
    for name in ("torch", "pyzmq", "msgspec", "numpy"):
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name} is not installed")
    return "\n".join(lines)


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode()
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime = len(data), int(time.time())
    archive.addfile(entry, io.BytesIO(data))
