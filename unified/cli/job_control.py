"""``unified call`` and ``unified stop``: commands that act on a running job."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import msgspec

from unified.cli.options import add_job, add_master, at_least, connect
from unified.client.handle import JobHandle
from unified.errors import RemoteError, RpcNotFoundError, UsageError
from unified.protocol.client_master import StopJob
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

    # Without pickles, since what comes back may be of anybody's job.
    with connect(master) as connection, without_pickles(), closing(OutsideCaller(connection, job)) as caller:
        try:
            called = caller.group(target) if caller.has_role(target) else caller.worker(target)
            result = called.call(method, *args, _timeout=timeout, **kwargs).result()
            for value in result if isinstance(result, RpcStream) else [result]:
                print(to_json(value))
        except RpcNotFoundError as error:
            print(f"unified: {error}", file=sys.stderr)
            return EXIT_WRONG
        except RemoteError as error:
            print(f"unified: {error.type_name}: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
            return 1
    return 0


def parse_arguments(words: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """Positional arguments and those by name."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        is_named = bool(equals) and name.isidentifier()
        try:
            value = msgspec.json.decode(text if is_named else word)
        except msgspec.DecodeError:
            raise UsageError(
                f"the argument {word!r} is not JSON: a text is written '\"text\"', in quotes that the shell leaves."
            ) from None
        if is_named:
            kwargs[name] = value
        elif kwargs:
            raise UsageError(f"the argument {word!r} comes behind one that is given by name: put it in front.")
        else:
            args.append(value)
    return args, kwargs


def to_json(value: object) -> str:
    """One line; arrays and tensors as nested lists, bytes in base64."""
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
    with connect(master) as connection:
        found = JobHandle(connection, job).status()
        job_id = found.job_id  # a name may mean another job a moment later
        if found.stage == Stage.STOPPED:
            print(f"{job_id} had already ended with exit code {found.exit_code}")
            return
        connection.request(StopJob(job=job_id, force=force, reason="unified stop"))
        if no_wait:
            print(f"{job_id} is stopping")
            return
        JobHandle(connection, job_id).wait(timeout)
        print(f"{job_id} is stopped")
