"""The options of `torchrun` and `dlrover-run`, and the rule for several hosts: which commands are one job.

The real parser is in torch, but importing torch takes longer than all other work of starting a job. So there is
this table. A test compares it with the parser of the installed torch, option by option.
"""

from __future__ import annotations

import signal
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from unified.errors import OptionError, UsageError, nearest
from unified.job.names import parse_nnodes

_HERE = "Accepted; the master does this here."
_JOINS = "With --nnodes above 1, the same command on several hosts is one job of the master's."
_LOGS = "Accepted; see `unified logs`."
_STREAMS = "0 none, 1 stdout, 2 stderr, 3 both; or so for some local ranks, 0:1,1:2."
_THIS_HOST = ("", "localhost", "127.0.0.1", "::1", "[::1]", "0.0.0.0")
_NO_ID = ("", "none")
_STATIC_PORT = 29500
"""torchrun's default port."""


_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGSTOP)


class Option(NamedTuple):
    """One option. As with torchrun, its default may come from ``PET_{dest}`` in the environment."""

    names: tuple[str, ...]
    default: Any
    help: str
    type: type = str
    choices: tuple[str, ...] | None = None
    env: bool = True

    @property
    def is_flag(self) -> bool:
        return self.default is False

    @property
    def dest(self) -> str:
        longest = next(name for name in self.names if name.startswith("--"))
        return longest.strip("-").replace("-", "_")


def _both(name: str) -> tuple[str, str]:
    return f"--{name}", f"--{name.replace('-', '_')}"


TORCHRUN = (
    Option(("--nnodes",), "1:1", "Nodes, or a range of them, MIN:MAX."),
    Option(_both("nproc-per-node"), "1", "Workers on each node: a number, cpu, gpu, or auto."),
    Option(_both("rdzv-backend"), "static", _HERE),
    Option(_both("rdzv-endpoint"), "", _JOINS),
    Option(_both("rdzv-id"), "none", "TORCHELASTIC_RUN_ID of the ranks. " + _JOINS),
    Option(_both("rdzv-conf"), "", _HERE),
    Option(
        ("--standalone",), False, "This host alone: without a master, with several nodes on it if --nnodes says so."
    ),
    Option(_both("max-restarts"), 0, "Restarts of all workers together before the job fails.", type=int),
    Option(_both("monitor-interval"), 0.1, "Accepted; workers are watched, not polled.", type=float),
    Option(
        _both("start-method"),
        "spawn",
        "Accepted; it never applied to scripts.",
        choices=("spawn", "fork", "forkserver"),
    ),
    Option(_both("event-log-handler"), "null", "Accepted; see `unified explain`."),
    Option(("--role",), "default", "Name of the role."),
    Option(("-m", "--module"), False, "TRAINING_SCRIPT is a module, as with `python -m`."),
    Option(_both("no-python"), False, "Run any program in place of a Python script."),
    Option(_both("run-path"), False, "Accepted; scripts always run in a process that has Python loaded."),
    Option(_both("log-dir"), None, "What ranks print, in files: RDZV_ID/attempt_N/RANK/stdout.log, stderr.log."),
    Option(("-r", "--redirects"), "0", f"To files, and not shown: {_STREAMS}"),
    Option(("-t", "--tee"), "0", f"To files, and shown with [ROLE LOCAL_RANK]: in front: {_STREAMS}"),
    Option(_both("log-line-prefix-template"), "", "What --tee puts in front, of ${role_name}, ${local_rank}, ${rank}."),
    Option(_both("local-ranks-filter"), "", "Local ranks whose output is shown: 0,1. By default all."),
    Option(_both("duplicate-stdout-filters"), [], _LOGS, type=list),
    Option(_both("duplicate-stderr-filters"), [], _LOGS, type=list),
    Option(
        _both("node-rank"), 0, "Accepted where --rdzv-id, --rdzv-endpoint or --master-addr names the job.", type=int
    ),
    Option(_both("master-addr"), "127.0.0.1", _JOINS),
    Option(_both("master-port"), None, "MASTER_PORT of the ranks; by default any that is free.", type=int),
    Option(_both("local-addr"), None, "Accepted; the agent knows its address."),
    Option(_both("logs-specs"), None, _LOGS, env=False),
    Option(
        _both("numa-binding"),
        None,
        "Accepted, without effect.",
        choices=("node", "socket", "exclusive", "core-complex"),
        env=False,
    ),
    Option(_both("signals-to-handle"), _SIGNALS, "Signals that go to the ranks, beside USR1, USR2 and HUP."),
    Option(_both("shutdown-timeout"), None, "Accepted; `stop_grace_s` is the option of a job.", type=int),
    Option(_both("virtual-local-rank"), False, "Accepted, without effect."),
)


NODE_CHECK = Option(
    ("--node-check", "--node_check", "--network-check", "--network_check"), False, "Test nodes and links first."
)


DLROVER_RUN = (
    NODE_CHECK,
    Option(("--precheck",), 0, "Test nodes and links first, if above 0.", type=int),
    Option(_both("comm-perf-test"), False, "As --node-check."),
    Option(_both("exclude-straggler"), False, "As --node-check."),
    Option(_both("node-unit"), 1, "Accepted, without effect.", type=int),
    Option(_both("auto-config"), False, "Accepted, without effect: say --nnodes and --nproc-per-node."),
    Option(_both("auto-tunning"), False, "Accepted, without effect."),
    Option(_both("save-at-breakpoint"), False, "Accepted, without effect."),
    Option(("--accelerator",), "nvidia.com/gpu", "Accepted; agents find their accelerators."),
    Option(_both("training-port"), 60000, "Accepted; ports are chosen by the system.", type=int),
    Option(_both("numa-affinity"), False, "Accepted, without effect."),
    Option(_both("membind-policy"), "preferred", "Accepted, without effect."),
    Option(("--ucp_device_type", "--ucp-device-type"), "cpu", "Accepted, without effect."),
)


LAUNCHERS = {"torchrun": (), "dlrover-run": DLROVER_RUN}
"""Launcher → its options besides torchrun's."""


def named_signals(text: str) -> list[int]:
    """Return the numbers of the signals that ``--signals-to-handle`` names, except those that stop a job.

    UsageError: a name is no signal.
    """
    found = []
    for name in text.split(",") if text != _SIGNALS else ():
        if name.strip() not in signal.Signals.__members__:
            hint = nearest(name.strip(), signal.Signals.__members__)
            raise UsageError(f"--signals-to-handle: {name.strip()!r} is no signal.{hint}")
        found.append(signal.Signals[name.strip()])
    return [int(number) for number in found if number not in _STOPS]


class _LaunchParser(ArgumentParser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does, but leave all words after the script to the script, even our options."""
        words = list(sys.argv[1:] if args is None else args)
        end = self._script_at(words) + 1
        found, unknown = super().parse_known_args(words[:end], namespace)
        found.training_script_args = words[end:]
        return found, unknown

    def _script_at(self, words: list[str]) -> int:
        at = 0
        while at < len(words) and words[at].startswith("-"):
            at += 2 if self._takes_next(words[at]) else 1
        return at

    def _takes_next(self, word: str) -> bool:
        actions = self._option_string_actions
        alike = {actions[word]} if word in actions else {actions[name] for name in actions if name.startswith(word)}
        return bool(alike) and all(action.nargs != 0 for action in alike)

    def error(self, message: str) -> NoReturn:
        """Raise an `OptionError`, where argparse would end the process."""
        unknown = message.removeprefix("unrecognized arguments: ").split() if message.startswith("unrecognized") else []
        known = [name for action in self._actions for name in action.option_strings]
        hint = nearest(unknown[0].split("=")[0], known) if unknown else ""
        raise OptionError(f"{self.prog}: {message}.{hint}")


def table_parser(launcher: str, env: Mapping[str, str], prog: str | None = None) -> ArgumentParser:
    """Return a parser of the launcher's options, which raises `OptionError` where argparse would end the process."""
    parser = _LaunchParser(prog=prog or launcher, allow_abbrev=launcher == "torchrun")
    for option in (*TORCHRUN, *LAUNCHERS[launcher]):
        add_option(parser, option, env)
    if launcher == "dlrover-run" and "PET_MAX_RESTARTS" not in env:
        parser.set_defaults(max_restarts=None)  # dlrover-run's default is the default of a role
    parser.add_argument("training_script", type=str, help="Script, or module with -m, that each worker runs.")
    parser.add_argument("training_script_args", nargs=REMAINDER, help="Its arguments.")
    return parser


def add_option(parser: ArgumentParser, option: Option, env: Mapping[str, str]) -> None:
    """Add one option, with its default from the environment."""
    default, given = option.default, env.get(f"PET_{option.dest.upper()}") if option.env else None
    if option.is_flag:
        default = given is not None and given != "0"
        parser.add_argument(*option.names, dest=option.dest, action="store_true", default=default, help=option.help)
    else:
        default = default if given is None else given
        kind: Any = (lambda text: text.split(",")) if option.type is list else option.type
        parser.add_argument(
            *option.names, dest=option.dest, type=kind, default=default, choices=option.choices, help=option.help
        )


def run_id(args: Namespace) -> str:
    """Return the run's id from `--rdzv-id`; empty without one."""
    return "" if args.rdzv_id in _NO_ID else str(args.rdzv_id)


def common_key(args: Namespace) -> str:
    """Return the key that the commands of one job on several hosts have in common; empty for a job of one command."""
    if _highest(args.nnodes) < 2:
        return ""
    if found := run_id(args):
        return found
    if _is_elsewhere(args.rdzv_endpoint):
        return str(args.rdzv_endpoint)
    if _is_elsewhere(args.master_addr):
        return f"{args.master_addr}:{args.master_port or _STATIC_PORT}"
    return ""


def key_here(args: Namespace) -> str:
    """Return the key that the commands of one world on this host have in common; empty for a world of one command."""
    port = args.rdzv_endpoint.rpartition(":")[2]
    is_one_of_many = _highest(args.nnodes) > 1 and not args.standalone and bool(args.rdzv_endpoint or run_id(args))
    return f"{port if port.isdecimal() else ''} {run_id(args)}" if is_one_of_many and port != "0" else ""


def check_hosts(args: Namespace, prog: str, *, has_master: bool, can_join: bool = True) -> None:
    """Refuse a command that would be a job of its own on each host, and say how the hosts become one job.

    Args:
        has_master: the job goes to a master, which knows more hosts than this one.
        can_join: a command with a `common_key` joins the job that another host has submitted.

    Raises:
        UsageError: the command is refused, or its number of nodes or restarts is invalid.
    """
    try:
        parse_nnodes(args.nnodes)
    except ValueError as error:
        raise UsageError(f"{prog}: --{error}") from None
    if (args.max_restarts or 0) < 0:
        raise UsageError(f"{prog}: --max-restarts={args.max_restarts} is not a number of restarts: 0 or more.")
    if not has_master:
        names_other_host = _is_elsewhere(args.rdzv_endpoint) or _is_elsewhere(args.master_addr)
        is_one_of_many = _lowest(args.nnodes) > 1 or (_highest(args.nnodes) > 1 and names_other_host)
        if args.node_rank > 0 or (is_one_of_many and not args.standalone):
            raise UsageError(
                f"{prog}: --nnodes={args.nnodes} --node-rank={args.node_rank} without a master: hosts find each other "
                "through a master here. Start `unified-master` on one of them and `unified-agent` on each, and give "
                "the address with --master or UNIFIED_MASTER. (--standalone lets this host stand in for all nodes.)"
            )
    elif args.node_rank > 0 and not (can_join and common_key(args)):
        raise UsageError(
            f"{prog}: --node-rank={args.node_rank} has nothing to start: a job is submitted once, and the master "
            "starts it on all its nodes. Run the command on one host only, without --node-rank."
            + (" Or give it the same --rdzv-id on each host: then they are one job." if can_join else "")
        )


def _is_elsewhere(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    return (host if host and port.isdecimal() else endpoint) not in _THIS_HOST


def _lowest(nnodes: str) -> int:
    return _number(nnodes.partition(":")[0])


def _highest(nnodes: str) -> int:
    return _number(nnodes.rpartition(":")[2])


def _number(text: str) -> int:
    """Return `text` as a number; 1 if it is none, which `parse_nnodes` refuses."""
    return int(text) if text.isdecimal() else 1
