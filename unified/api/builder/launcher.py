"""Command lines of `torchrun` and `dlrover-run` as descriptions of a job."""

from __future__ import annotations

import logging
import os
import re
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import PurePath
from typing import Any, Protocol, Self

from unified.api.builder.roles import ElasticRoleBuilder
from unified.api.builder.torchrun import LAUNCHERS, check_hosts, common_key, run_id, table_parser
from unified.config.addresses import find_master
from unified.errors import UsageError, nearest
from unified.job.entrypoint import NO_PYTHON
from unified.job.names import parse_nnodes
from unified.protocol.client_master import NodeStatus
from unified.protocol.records import NodeState

OUTPUT_OPTIONS = {"log_dir", "redirects", "tee", "local_ranks_filter", "log_line_prefix_template"}
_ONE = re.compile(r"[0-3]\Z")
_MAP = re.compile(r"\d+:[0-3](,\d+:[0-3])*\Z")
_PREFIX_TEMPLATE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
_RANKS = re.compile(r"\d+(,\d+)*\Z")
_log = logging.getLogger(__name__)
_USED = {
    *("nnodes", "nproc_per_node", "max_restarts", "role", "module", "no_python", "run_path", "standalone"),
    *("node_rank", "master_port", "rdzv_id", "signals_to_handle"),
}
_JOINING = {"rdzv_backend", "rdzv_endpoint", "master_addr"}
"""Options that are used only if the command has a `common_key`."""
_CHECKS = {"node_check", "precheck", "comm_perf_test", "exclude_straggler"}
_SCRIPT = {"training_script", "training_script_args"}


class JobBuilder(Protocol):
    """Methods of `DLJobBuilder` with which a command line describes a job."""

    def node_num(self, num: int) -> Self: ...
    def device_per_node(self, num: int) -> Self: ...
    def may_share_nodes(self) -> Self: ...
    def device_type(self, device_type: str) -> Self: ...
    def role(self, role: str) -> Self: ...
    def train(self, entrypoint: str) -> ElasticRoleBuilder[Any]: ...
    def no_setup_process_group(self) -> Self: ...
    def skip_node_check(self) -> Self: ...


def apply_command(builder: JobBuilder, cmd: str) -> None:
    """Describe a role of `builder` by a launcher's command line; see `DLJobBuilder.by_dlrover_run_cmd`."""
    try:
        words = shlex.split(cmd.replace("\\\n", " "))
    except ValueError as error:
        raise UsageError(f"command {cmd!r}: {error}. Close each quote.") from None
    launcher = PurePath(words[0]).name if words else ""
    if launcher not in LAUNCHERS:
        raise UsageError(
            f"Only 'dlrover-run' and 'torchrun' commands are supported, got {launcher!r}.{nearest(launcher, LAUNCHERS)}"
        )
    parser = table_parser(launcher, os.environ)
    arguments = parser.parse_args(words[1:])
    check_hosts(arguments, launcher, has_master=True, can_join=False)
    nodes = None
    if not arguments.nproc_per_node.isdecimal() and (master := find_master(None)):
        from unified.client.submission import cluster_nodes  # loads zmq, which a description does not need

        nodes = cluster_nodes(master)
    describe(builder, arguments, parser, launcher, nodes)


def describe(
    builder: JobBuilder,
    args: Namespace,
    parser: ArgumentParser,
    launcher: str,
    nodes: Sequence[NodeStatus] | None = None,
) -> None:
    """Add the role that parsed arguments describe, and the nodes and devices it needs.

    Args:
        nodes: nodes of the job's cluster, if known, on which ``cpu``, ``gpu`` and ``auto`` are counted.
    """
    if args.no_python and args.module:
        raise UsageError(f"{parser.prog}: --no-python and -m contradict each other: leave one of them out.")
    if args.logs_specs is not None and not entry_points(group="torchrun.logs_specs", name=args.logs_specs):
        raise UsageError(
            f"{parser.prog}: --logs-specs={args.logs_specs}: no package that is installed here has this entry point in "
            "the group torchrun.logs_specs. Leave the option out: it would have no effect."
        )
    _report_ignored(args, parser)
    nproc = num_workers(args.nproc_per_node, nodes)
    _, max_nodes = parse_nnodes(args.nnodes)
    builder.node_num(max_nodes).device_per_node(nproc).may_share_nodes()
    if args.nproc_per_node == "cpu":
        builder.device_type("CPU")
    if args.role != "default":
        builder.role(args.role)
    role = builder.train(_entry_point(args))
    role.nnodes(args.nnodes).nproc_per_node(nproc).resource(accelerator=1)
    if args.max_restarts is not None:
        role.max_restart(args.max_restarts).role_max_restart(args.max_restarts)
    if args.master_port or run_id(args):
        role.rendezvous(args.master_port or 0, run_id(args))
    if files := output_files(args, parser.prog, nproc):
        role.output_files(**files)
    if launcher == "torchrun":
        builder.no_setup_process_group()  # its scripts call init_process_group themselves
    elif not any(getattr(args, name) for name in _CHECKS):
        builder.skip_node_check()


def num_workers(nproc_per_node: str, nodes: Sequence[NodeStatus] | None = None) -> int:
    """Return the workers on each node. ``cpu``, ``gpu`` and ``auto`` count devices or cores that every node has.

    Args:
        nodes: nodes of the cluster, to count on; None: count on this machine.
    """
    if nproc_per_node.isdecimal() and int(nproc_per_node) > 0:
        return int(nproc_per_node)
    if nodes is not None and nproc_per_node in ("cpu", "gpu", "auto"):
        return _count_in_cluster(nproc_per_node, nodes)
    cpus = len(os.sched_getaffinity(0))
    match nproc_per_node:
        case "cpu":
            return cpus
        case "auto":
            return _num_gpus(os.environ) or cpus
        case "gpu":
            if gpus := _num_gpus(os.environ):
                return gpus
            raise UsageError(
                "--nproc-per-node=gpu: this machine has no NVIDIA GPU to count. Give the number that each node has."
            )
    raise UsageError(f"--nproc-per-node={nproc_per_node} must be a number above 0, or cpu, gpu or auto.")


def _count_in_cluster(word: str, nodes: Sequence[NodeStatus]) -> int:
    """Return the number on the smallest node; for GPUs, on the smallest node that has any."""
    alive = [node.resources for node in nodes if node.state == NodeState.ALIVE]
    if not alive:
        raise UsageError(f"--nproc-per-node={word}: the cluster has no node to count. Give the number that each has.")
    gpus = [sum(device.kind != "virtual" for device in node.devices) for node in alive]
    if word != "cpu" and any(gpus):
        return min(number for number in gpus if number)
    if word == "gpu":
        raise UsageError("--nproc-per-node=gpu: no node of the cluster has a GPU. Give the number of workers of each.")
    return max(1, int(min(node.cpu for node in alive)))


def _entry_point(args: Namespace) -> str:
    words = [args.training_script, *args.training_script_args]
    if args.no_python:
        return shlex.join([NO_PYTHON, *words])
    if not args.module and "/" not in words[0] and not words[0].endswith(".py"):
        words[0] = f"./{words[0]}"  # a file or a folder, even if it looks like `module.attr`
    return shlex.join(["-m", *words] if args.module else words)


def _report_ignored(args: Namespace, parser: ArgumentParser) -> None:
    names = {action.dest: action.option_strings for action in parser._actions}
    known = _USED | _CHECKS | _SCRIPT | OUTPUT_OPTIONS | (_JOINING if common_key(args) else set())
    ignored = [
        names[dest][0] for dest, value in vars(args).items() if dest not in known and value != parser.get_default(dest)
    ]
    if ignored:
        _log.warning("%s: ignored, because the master and the agents do this: %s", parser.prog, ", ".join(ignored))


def _num_gpus(env: Mapping[str, str]) -> int:
    """Return the number of NVIDIA GPUs that a process here may use; 0 without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        found = int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
    visible = env.get("CUDA_VISIBLE_DEVICES")
    return found if visible is None else min(found, len([word for word in visible.split(",") if word.strip()]))


def output_files(args: Namespace, prog: str, nproc: int) -> dict[str, Any] | None:
    """Return a role's `output_files`; None if the options set nothing.

    Args:
        prog: name of the program in messages.
        nproc: workers on each node, for a value that holds for all of them.
    """
    redirects = _streams(args.redirects, prog, "--redirects", nproc)
    tee = _streams(args.tee, prog, "--tee", nproc)
    ranks = _local_ranks(args.local_ranks_filter, prog)
    if args.log_dir == os.devnull:  # torchrun then writes no file and shows all output
        redirects, tee = {}, {}
    log_dir = os.path.abspath(args.log_dir) if args.log_dir and args.log_dir != os.devnull else ""
    if os.path.isfile(log_dir):
        raise UsageError(f"{prog}: --log-dir={args.log_dir} is a file: name a folder.")
    if not (log_dir or redirects or tee or ranks):
        return None
    return {
        "log_dir": log_dir,
        "run_id": str(args.rdzv_id or "none").replace("/", "_"),
        "redirects": redirects,
        "tee": tee,
        "local_ranks": ranks,
        "label": args.role,
        **(
            {"line_prefix": template}
            if (template := args.log_line_prefix_template or os.environ.get(_PREFIX_TEMPLATE))
            else {}
        ),
    }


def _streams(text: str, prog: str, option: str, nproc: int) -> dict[int, int]:
    """Local rank → 1 for stdout, 2 for stderr, 3 for both."""
    if _ONE.match(text):
        return dict.fromkeys(range(nproc), int(text)) if int(text) else {}
    if not _MAP.match(text):
        raise UsageError(
            f"{prog}: {option}={text} is neither one of 0 (none), 1 (stdout), 2 (stderr), 3 (both), nor such a number "
            "for some local ranks: 0:1,1:2."
        )
    pairs = (pair.split(":") for pair in text.split(","))
    return {int(rank): int(streams) for rank, streams in pairs if int(streams)}


def _local_ranks(text: str, prog: str) -> list[int]:
    if text and not _RANKS.match(text):
        raise UsageError(f"{prog}: --local-ranks-filter={text} is no list of local ranks, such as 0,1.")
    return sorted({int(rank) for rank in text.split(",")}) if text else []
