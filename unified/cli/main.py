"""The `unified` command: finds the subcommand, turns errors into exit codes.

Exit codes: 0 all well, 1 the job failed or the cluster said no, 2 the command line is wrong or names a job, worker or
log that is not there, 130 stopped by the user, 143 by SIGTERM.
The words of `run` go to a parser of their own, which ends at the script.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence

from unified.errors import ProtocolError, RefusedError, UnifiedError, UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code."""
    code = guarded(lambda: _command(list(sys.argv[1:] if argv is None else argv)))
    if argv is None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one that comes while the interpreter ends changes nothing
    return code


def _command(words: list[str]) -> int:
    if words[:1] == ["run"]:
        from unified.cli.run import run

        return run(words[1:])
    from unified.cli.commands import execute

    return execute(words)


def release() -> str:
    """The installed release, such as ``0.1.0``."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("unified-runtime")
    except PackageNotFoundError:  # a source tree on the path, not installed
        return "unknown (not installed)"


def guarded(command: Callable[[], int]) -> int:
    """The exit code of a command, whose errors become a line or two on stderr."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except SystemExit as end:  # --help, and what Ctrl-C and SIGTERM make of a job's driver
        if isinstance(end.code, str):  # sys.exit("why") in a job's file
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except UsageError as error:
        return _say(error, 2)
    except (UnifiedError, TimeoutError) as error:
        return _say(error, 2 if isinstance(error, RefusedError) and error.code == "not-found" else 1)
    except KeyboardInterrupt:
        print("unified: ended by Ctrl-C", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `| head` has seen enough; nothing may be flushed at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _say(error: Exception, code: int) -> int:
    text = str(error)
    hint = " (unified --version tells yours)" if isinstance(error, ProtocolError) else ""
    print(f"{'' if text.startswith('unified') else 'unified: '}{text}{hint}", file=sys.stderr)
    return code
