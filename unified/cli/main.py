"""The `unified` command: finds the subcommand, turns errors into exit codes.

A subcommand's file is imported only when it is called, so that `--help` and other commands start quickly.

Exit codes: 0 success, 1 the job failed or the cluster refused, 2 the command line is wrong or names a job, worker or
log that does not exist, 130 stopped by the user, 143 by SIGTERM.
The words of `run` go to a parser of their own, which ends at the script.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
from argparse import SUPPRESS, Action, ArgumentParser, _SubParsersAction
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn

from unified.errors import ProtocolError, RefusedError, UnifiedError, UsageError, nearest


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; return the exit code."""
    code = guarded(lambda: _command(list(sys.argv[1:] if argv is None else argv)))
    if argv is None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C while the interpreter ends must not change the code
    return code


def _command(words: list[str]) -> int:
    if words[:1] == ["run"]:
        from unified.cli.run import run

        return run(words[1:])
    if words and words[0].partition("=")[0] == "--slurm":
        from unified.cli.slurm import variables
        from unified.slurm.commands import folder_of

        _, is_joined, slurm_id = words[0].partition("=")
        first, *rest = [slurm_id, *words[1:]] if is_joined else (words[1:] or [""])
        if not first:
            raise UsageError("--slurm needs the id of a job of SLURM: unified --slurm 4711 status.")
        os.environ.update(variables(folder_of(first)))
        return _command(rest)
    if words[:2] == ["slurm", "run"]:
        from unified.cli import slurm

        return slurm.run(words[2:])
    return execute(words)


def release() -> str:
    """Return the installed release, such as ``0.1.0``."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("unified-runtime")
    except PackageNotFoundError:  # a source tree on the path, not installed
        return "unknown (not installed)"


def guarded(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; print its errors as a line or two on stderr."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except SystemExit as end:  # --help, or Ctrl-C or SIGTERM to a job's driver
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
    except BrokenPipeError:  # `| head` has ended. The flush at exit must not fail either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _say(error: Exception, code: int) -> int:
    from unified.config.logging import escaped  # imported late, so that --help is quick

    text = "\n".join(map(escaped, str(error).split("\n")))
    hint = " (unified --version tells yours)" if isinstance(error, ProtocolError) else ""
    print(f"{'' if text.startswith('unified') else 'unified: '}{text}{hint}", file=sys.stderr)
    return code


class Command(NamedTuple):
    """A subcommand: a function of `unified.cli.MODULE`. Its parameters are the arguments that `NAME_arguments` adds."""

    module: str
    help: str
    """Text in the list of commands; `--help` of the command itself shows the function's docstring."""


class Group(NamedTuple):
    """A word that is followed by a command, such as ``key``."""

    commands: Mapping[str, Command | Group]
    help: str


_KEY = {
    "new": Command("key", "Make a new cluster key."),
    "show": Command("key", "Print the fingerprint of the cluster key."),
    "rotate": Command("key", "Replace the cluster key without stopping the cluster."),
}
_SYSTEMD = {"install": Command("systemd", "Write the units of a daemon for systemd.")}
_SLURM = {
    "submit": Command("slurm", "Submit the job of a file to SLURM: an allocation and a cluster of its own."),
    "run": Command("slurm", "Run a script on an allocation of its own, as torchrun would."),
    "up": Command("slurm", "Make this allocation (salloc) a cluster, until Ctrl-C."),
    "exec": Command("slurm", "Run a command on a cluster of this allocation: slurm exec -- python train.py"),
    "grow": Command("slurm", "Add nodes to a cluster that runs: an array of jobs of one node each."),
    "attach": Command("slurm", "Run a command on the first node of a job: slurm attach ID -- unified status -w"),
    "agent": Command("slurm", "Be the agent of this node; the other commands start it."),
}


_KUBERNETES: dict[str, Command | Group] = {
    "render": Group(
        {
            "cluster": Command("kubernetes", "Print the manifests of a cluster that stays."),
            "run": Command("kubernetes", "Print the manifests of one run, with agents of its own."),
        },
        "Print manifests for `kubectl apply -f -`.",
    ),
    "pod": Command("kubernetes", "Run one pod of a run, as its manifest says."),
}


COMMANDS: dict[str, Command | Group] = {
    "submit": Command("submit", "Submit the job of a file, and show it until it has ended."),
    "run": Command("run", "Run a script as torchrun would."),
    "up": Command("kept", "Start a cluster on this host that stays, for the jobs to come."),
    "down": Command("kept", "End that cluster."),
    "jobs": Command("show", "List jobs, newest first."),
    "status": Command("show", "Show a job."),
    "top": Command("top", "Show jobs, roles and nodes in a live table."),
    "metrics": Command("metrics", "Show what workers of a job reported, as a table, CSV or for TensorBoard."),
    "logs": Command("logs", "Print what a job's workers printed."),
    "call": Command("job_control", "Call a method of a job's workers and print the result as JSON."),
    "stop": Command("job_control", "Stop a job and wait until it has ended."),
    "suspend": Command("job_control", "Stop the workers of a job, which waits for `unified resume`, without a charge."),
    "resume": Command("job_control", "Put a suspended job back into the queue."),
    "nodes": Command("show", "List nodes: what each has, and what of it no job holds."),
    "drain": Command("node_control", "Take a node out of service: its workers move, without a charge."),
    "undrain": Command("node_control", "Put a node back into service."),
    "explain": Command("show", "Say what was decided about a job, or one worker of it, with the reasons."),
    "timeline": Command("timeline", "Write the timeline of a job for Perfetto: rounds, incarnations, saves, calls."),
    "stack": Command("stack", "Show where each worker of a job stands, and who waits for whom."),
    "profile": Command("profile", "Write a flame graph of a worker, or a trace of one step of it."),
    "ui": Command("ui", "Show the cluster in a browser."),
    "doctor": Command("doctor", "Say what is wrong on this host, and between it and the cluster."),
    "diagnose": Command("diagnose", "Write one archive about a job for a bug report, without secrets."),
    "attach": Command("job_control", "Type to the pdb of a worker that waits at a breakpoint."),
    "simulate": Command("simulate", "Simulate a cluster under faults, to see what it would spend on them."),
    "slurm": Group(_SLURM, "Run jobs and clusters in allocations of SLURM."),
    "systemd": Group(_SYSTEMD, "Run the daemons as services."),
    "kubernetes": Group(_KUBERNETES, "Run on Kubernetes, without an operator."),
    "key": Group(_KEY, "Make or replace the cluster's key, or see which one this host has."),
}


class CommandParser(ArgumentParser):
    """Raises `UsageError` where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"(?:unrecognized arguments: |argument COMMAND: invalid choice: ')([^\s=']+)", message)
        hint = nearest(unknown[1], [*self._option_string_actions, *_below(self)]) if unknown else ""
        if unknown and message.startswith("argument COMMAND"):  # argparse would list all commands before the hint
            message = f"there is no command {unknown[1]!r}"
        raise UsageError(f"{self.prog}: {message}.{hint} (`{self.prog} --help` shows what there is.)")


class _Version(Action):
    """Version option that reads the release only when it is used. argparse's own would read it always: 10 ms."""

    def __call__(self, parser: ArgumentParser, *_: object) -> NoReturn:
        print(f"unified-runtime {release()}")
        parser.exit()


def build(words: Sequence[str] | None = None) -> CommandParser:
    """Return the parser of the command line.

    Args:
        words: a command line; only its own command gets options, the others only names. None: all get options.
    """
    parser = CommandParser(
        prog="unified",
        description="Run distributed training and reinforcement-learning jobs, and look at them.",
        allow_abbrev=False,
    )
    parser.add_argument("--slurm", metavar="ID", default=SUPPRESS, help="First: use the cluster of this job of SLURM.")
    parser.add_argument("--version", nargs=0, action=_Version, default=SUPPRESS, help="Print the release and exit.")
    _add(parser, COMMANDS, words)
    return parser


def execute(words: Sequence[str]) -> int:
    """Run one command line; return the exit code."""
    parser: ArgumentParser = build(words)
    if not words:
        parser.print_help()
        return 2
    rest = list(words)
    while rest and rest[0] in (below := _below(parser)):
        parser = below[rest.pop(0)]
    # Options may stand between the words of a command. argparse does not allow this for commands with commands below
    # them, and for a line with another program's command after `--`.
    is_plain = "--" in rest or bool(_below(parser))
    arguments = vars(parser.parse_args(rest) if is_plain else parser.parse_intermixed_args(rest))
    return arguments.pop("function")(**arguments) or 0


def _below(parser: ArgumentParser) -> Mapping[str, ArgumentParser]:
    kinds = (action for action in parser._actions if isinstance(action, _SubParsersAction))
    return next((action.choices for action in kinds), {})


def _add(parser: ArgumentParser, commands: Mapping[str, Command | Group], words: Sequence[str] | None) -> None:
    kinds = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in commands.items():
        own = kinds.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        if words is not None and words[:1] != [name]:
            continue
        if isinstance(command, Group):
            _add(own, command.commands, None if words is None else words[1:])
        elif command.module != "run":  # the words of `run` go to a parser of their own
            module = importlib.import_module(f"unified.cli.{command.module}")
            function = getattr(module, name)
            own.description = function.__doc__
            own.set_defaults(function=function)
            getattr(module, f"{name}_arguments")(own)
