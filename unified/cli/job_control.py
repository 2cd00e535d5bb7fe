"""``unified call``, ``attach``, ``stop``, ``suspend`` and ``resume``: commands that act on a running job."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Any

import msgspec

from unified.cli.options import add_job, add_master, at_least
from unified.client import suspension
from unified.client.connection import connect_master
from unified.client.handle import JobHandle
from unified.client.terminal import printable
from unified.config.logging import escaped
from unified.errors import RemoteError, RpcNotFoundError, UsageError
from unified.protocol.client_master import Done, ResumeJob, StopJob
from unified.protocol.records import Stage

EXIT_WRONG = 2


def call_arguments(parser: ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("target", metavar="ROLE[-RANK]", help="A role, for all its workers, or one of them.")
    parser.add_argument("method", metavar="METHOD", help="The name under which it is registered.")
    parser.add_argument("arguments", metavar="JSON", nargs="*", help='Arguments: 3, "text", [1,2], or by name: lr=0.1')
    add_master(parser)
    parser.add_argument(
        "--timeout", type=at_least(0.001), default=60.0, metavar="S", help="Seconds to the deadline of the call (60)."
    )


def call(job: str, target: str, method: str, arguments: list[str], master: str | None, timeout: float) -> int:
    """Call a method of a job's workers and print the result as JSON: of a role a list, by rank."""
    args, kwargs = parse_arguments(arguments)
    from unified.bus.codec.pickling import without_pickles
    from unified.bus.streams.stream import RpcStream
    from unified.client.outside import OutsideCaller

    # Without pickles, because the answer may come from another user's job.
    with connect_master(master) as connection, without_pickles(), closing(OutsideCaller(connection, job)) as caller:
        try:
            called = caller.group(target) if caller.has_role(target) else caller.worker(target)
            result = called.call(method, *args, _timeout=timeout, **kwargs).result()
            for value in result if isinstance(result, RpcStream) else [result]:
                print(to_json(value))
        except RpcNotFoundError as error:
            print(f"unified: {error}", file=sys.stderr)
            return EXIT_WRONG
        except RemoteError as error:
            text = "\n".join([f"unified: {error.type_name}: {error}", *getattr(error, "__notes__", ())])
            print("\n".join(map(escaped, text.split("\n"))), file=sys.stderr)
            return 1
    return 0


def parse_arguments(words: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional arguments and the arguments by name."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        is_named = bool(equals) and name.isidentifier()
        try:
            value = msgspec.json.decode(text if is_named else word)
        except msgspec.DecodeError:
            example = shlex.quote((f"{name}=" if is_named else "") + json.dumps(text if is_named else word))
            raise UsageError(
                f"arguments of a call have to be JSON, and {word!r} is not. If it is a text, write {example}; other "
                "examples: 3, true, '[1, 2]', and by name lr=0.1."
            ) from None
        if is_named:
            kwargs[name] = value
        elif kwargs:
            raise UsageError(f"the argument {word!r} comes after a named one: put it before.")
        else:
            args.append(value)
    return args, kwargs


def to_json(value: object) -> str:
    """Return one line of JSON; arrays and tensors become nested lists, bytes base64."""
    try:
        return msgspec.json.encode(value, enc_hook=_plain).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the result cannot be printed as JSON: {error}. Return plain data or arrays.") from None


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # an array, a tensor, or a number of either
        return value.tolist()
    if isinstance(value, complex):
        return [value.real, value.imag]
    raise TypeError(f"it holds a {type(value).__name__}")


def attach_arguments(parser: ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("worker", metavar="WORKER", help="A worker of it that waits, such as trainer-0.")
    add_master(parser)


def attach(job: str, worker: str, master: str | None) -> None:
    """Type to the pdb of a worker that waits at a breakpoint. Ctrl-D at its prompt, and Ctrl-C, leave it as it is."""
    from unified.bus.codec.pickling import without_pickles
    from unified.client.outside import OutsideCaller

    with suppress(ImportError):  # for editing lines, and a history
        import readline  # noqa: F401
    typed, end, state, num_left = "", -1, "", 0
    with connect_master(master) as connection, without_pickles(), closing(OutsideCaller(connection, job)) as caller:
        target = caller.worker(worker)
        try:
            while state != "off" and (state != "running" or sys.stdin.isatty()):  # a person may see it stop again
                was, answer = state, target.call("unified.attach", end, typed, num_left).result()
                text, end, state, num_left = answer
                if not was and state in ("running", "off"):
                    raise UsageError(f"{worker} waits at no breakpoint. `unified status {job}` shows who does.")
                *lines, prompt = text.split("\n")
                sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
                typed = input(printable(prompt)) + "\n" if state == "asking" else ""
        except (EOFError, KeyboardInterrupt):
            print(f"\nunified: left {worker} as it is; the same command comes back to it", file=sys.stderr)


def stop_arguments(parser: ArgumentParser) -> None:
    add_job(parser)
    add_master(parser)
    parser.add_argument("--force", action="store_true", help="Kill its workers at once, without a grace period.")
    parser.add_argument("--no-wait", action="store_true", help="Do not wait until it has ended.")
    parser.add_argument(
        "--timeout", type=at_least(0.0), default=60.0, metavar="S", help="Seconds to wait for its end (60)."
    )


def stop(job: str, master: str | None, force: bool, no_wait: bool, timeout: float) -> None:
    """Stop a job and wait until it has ended."""
    with connect_master(master) as connection:
        found = JobHandle(connection, job).status()
        job_id = found.job_id  # the name may mean another job later
        if found.stage == Stage.STOPPED:
            print(f"{job_id} had already ended with exit code {found.exit_code}")
            return
        connection.request(StopJob(job=job_id, force=force, reason="unified stop"))
        if no_wait:
            print(f"{job_id} is stopping")
            return
        JobHandle(connection, job_id).wait(timeout)
        print(f"{job_id} is stopped")


def suspend_arguments(parser: ArgumentParser) -> None:
    resume_arguments(parser)
    parser.add_argument("--reason", default="unified suspend", metavar="TEXT", help="Shown by `unified explain`.")
    parser.add_argument("--no-wait", action="store_true", help="Do not wait until its workers have ended.")
    parser.add_argument(
        "--timeout", type=at_least(0.0), default=300.0, metavar="S", help="Seconds to wait for that (300)."
    )


def suspend(job: str | None, is_all: bool, master: str | None, reason: str, no_wait: bool, timeout: float) -> None:
    """Stop the workers of a job, which then waits for `unified resume`.

    The workers are asked to stop, and have the job's grace period to save. Nothing is charged. The command waits until
    all have ended.
    """
    with connect_master(master) as connection:
        note = suspension.suspend(connection, _one_or_all(job, is_all), reason, None if no_wait else timeout)
    print(note)


def resume_arguments(parser: ArgumentParser) -> None:
    add_job(parser, is_optional=True)
    parser.add_argument("--all", dest="is_all", action="store_true", help="All jobs that have not ended.")
    add_master(parser)


def resume(job: str | None, is_all: bool, master: str | None) -> None:
    """Put a suspended job back into the queue: it begins again with its checkpoints and snapshots."""
    with connect_master(master) as connection:
        print(connection.ask(ResumeJob(job=_one_or_all(job, is_all)), Done).note)


def _one_or_all(job: str | None, is_all: bool) -> str:
    if (job is None) is not is_all:
        raise UsageError("name one job, or say --all for all that have not ended.")
    return job or ""
