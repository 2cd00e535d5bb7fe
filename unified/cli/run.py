"""``unified run``: a script as torchrun would run it, on a cluster.

Our own options stand before the script, among torchrun's; everything after the script belongs to the script.

`quick_spec` makes the job of an everyday command without the job description's models, because loading them takes
longer than all else before the submission. A test compares its jobs with those that the models make. The models make
all other jobs.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from msgspec import structs

from unified.api.builder.torchrun import check_hosts, common_key, key_here, named_signals, table_parser
from unified.cli.options import (
    DEBUGPY_HELP,
    NAME_HELP,
    NO_CLUSTER_TO_LEAVE,
    add_ship,
    at_least,
    begin_cluster,
    chosen_name,
    outcome,
)
from unified.config.addresses import LOCAL, find_master
from unified.config.settings import PRELOAD, Intervals
from unified.errors import UsageError
from unified.job.driver import DEBUGPY, WORKING_DIR, Driver, asked_for, passed_on
from unified.job.names import check_job_name, check_modules, quoted_ports
from unified.job.report_to import check_report_to
from unified.job.spec import Blob, Communication, EntryPoint, JobSpec, Resources, RoleSpec

if TYPE_CHECKING:
    from unified.job.config import JobConfig

_USED = {
    *("nnodes", "nproc_per_node", "max_restarts", "role", "module", "run_path", "standalone"),
    *("training_script", "training_script_args"),
}
_NOT_OPTIONS = {
    *(f"UNIFIED_{field.upper()}" for field in Intervals._fields),
    *("UNIFIED_MASTER", "UNIFIED_HOME", "UNIFIED_RUN_DIR", "UNIFIED_PROGRESS", "UNIFIED_CLUSTER_ID"),
    *("UNIFIED_KEY_FILE", "UNIFIED_INSECURE", DEBUGPY, PRELOAD),
}
_NO_CONFIG = Blob(codec="msgpack", data=b"\x80")
_ROLE = "ELASTIC"
OWN = ("master", "name", "detach", "no_wait", "env", "debugpy", "prefix", "hang_timeout", "ship", "exclude", "preload")
_ENV_HELP = "A variable of the workers, several times if need be; without a value, this shell's."
_MASTER_HELP = (
    "The master's address; else $UNIFIED_MASTER; else that of `unified up`. local, or none of these: a cluster of its "
    "own on this host, which ends with the job. So it is, too, within a worker of such a cluster."
)
_PREFIX_HELP = (
    "Put [ROLE-RANK] before each line that a worker prints; auto: on a terminal, and of several workers elsewhere, too."
)
_PRELOAD_HELP = "Import these once on each node, before the ranks are forked; several times if need be."
_HANG_HELP = "Seconds without a report, a collective or a call after which a hang is diagnosed, and the ranks fail."


def run(argv: Sequence[str]) -> int:
    """Run a command line; return the exit code."""
    parser = run_parser(os.environ)
    arguments = parser.parse_args(list(argv))
    own = {name: vars(arguments).pop(name) for name in OWN}
    signals = named_signals(arguments.signals_to_handle)
    if own["debugpy"]:
        os.environ[DEBUGPY] = str(own["debugpy"])
    own["master"] = own["master"] or _local_within_worker(os.environ)
    master = find_master(own["master"])
    if own["detach"] and master is None:
        raise UsageError(NO_CLUSTER_TO_LEAVE)
    check_hosts(arguments, parser.prog, has_master=master is not None)
    key = common_key(arguments)
    name = chosen_name(own["name"], arguments.training_script, os.environ, key=key)
    spec, waits, ship, exclude = described(arguments, parser, own, name, master=master)
    with ExitStack() as stack:
        if master is None:
            stack.enter_context(_hold_world(arguments, parser.prog))
            from unified.client.preload import guess, own_modules

            begin_cluster(guess(spec), own_modules(spec))
        from unified.client.submission import run_job, submit_job
        from unified.client.terminal import own_stdin

        archive = None
        if ship:
            from unified.client.code.archive import pack

            archive = stack.enter_context(pack(ship, exclude, spec.working_dir))
        options: Any = {"wait": waits, "joins": bool(key), "archive": archive, "master": master or own["master"]}
        if own["detach"]:
            return outcome(submit_job(spec, **options))
        spec = structs.replace(spec, stdin=own_stdin())
        return run_job(spec, prefix=own["prefix"], passed_on=signals, **options)


def _hold_world(arguments: Namespace, prog: str) -> AbstractContextManager[object]:
    """Hold the rendezvous that the command names on this host, until the context ends. UsageError: it is held."""
    if not (key := key_here(arguments)):
        return nullcontext()
    name = f"\0unified-rendezvous-{os.getuid()}-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
    holder, pid = socket.socket(socket.AF_UNIX), 0
    try:
        holder.bind(name)  # it is free again when this process ends, however it ends
        holder.listen()
        return holder
    except OSError:
        with holder, suppress(OSError):
            holder.setblocking(False)  # nobody accepts, so that at last there is no room
            holder.connect(name)
            pid, _, _ = struct.unpack("3i", holder.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    raise UsageError(
        f"{prog}: {f'process {pid}' if pid else 'another process'} on this host has a world at "
        f"--rdzv-endpoint={arguments.rdzv_endpoint} --rdzv-id={arguments.rdzv_id} already. Without a master, this "
        "command would start a second world, with a rank 0 of its own. For one world on this host, run one command "
        "with --standalone --nnodes=2. For two worlds, give each an --rdzv-id of its own."
    )


def _local_within_worker(env: Mapping[str, str]) -> str | None:
    """Return ``local`` within a worker of one driver's cluster, because the job already has that cluster's devices."""
    return LOCAL if env.get("UNIFIED_JOB_ID") and env.get("UNIFIED_CLUSTER_ID") else None


class Described(NamedTuple):
    """A job, and how to submit it."""

    spec: JobSpec
    waits: bool
    ship: Any
    exclude: list[str]


def described(
    arguments: Namespace, parser: ArgumentParser, own: Mapping[str, Any], name: str, *, master: str | None
) -> Described:
    """Return the job of a command line.

    Args:
        own: our own options, which are not in `arguments`.
    """
    driver = _driver(arguments, own["env"], is_on_cluster=master is not None)
    hang_timeout = own["hang_timeout"]
    spec = quick_spec(arguments, parser, name, driver, os.environ) if hang_timeout is None else None
    modules = check_modules(own["preload"])
    if spec is not None:
        return Described(structs.replace(spec, preload=modules), not own["no_wait"], own["ship"], own["exclude"])
    spec, config = full_spec(arguments, parser, name, driver, master, hang_timeout)
    spec = structs.replace(spec, preload=modules)
    waits, ship = not own["no_wait"] and config.wait, own["ship"] or config.ship
    return Described(spec, waits, ship, [*own["exclude"], *config.exclude])


def _driver(arguments: Namespace, asked: Sequence[str], *, is_on_cluster: bool) -> Driver:
    """Return what workers take from this process. A script brings its own folder; `-m` searches in the current one."""
    env: dict[str, str] = {}
    if is_on_cluster:  # the workers of an embedded cluster inherit all variables
        env, withheld = passed_on(os.environ)
        if left := [name for name in withheld if name not in asked]:
            names = ", ".join(left)
            print(
                "unified run: not sent to the cluster because they look like credentials "
                f"(--env NAME sends one): {names}",
                file=sys.stderr,
            )
    here = Driver.here()
    return here._replace(
        sys_path=[os.getcwd()] if arguments.module else [], env={**here.env, **env, **asked_for(asked, os.environ)}
    )


def run_parser(env: Mapping[str, str], prog: str = "unified run") -> ArgumentParser:
    """Return a parser of torchrun's options and our own."""
    parser = table_parser("torchrun", env, prog)
    parser.description = "Run a script as torchrun would, on a cluster."
    own = parser.add_argument_group("where and how to run it")
    own.add_argument("--master", metavar="tcp://HOST:PORT", help=_MASTER_HELP)
    own.add_argument("--name", help=NAME_HELP)
    own.add_argument("--env", metavar="NAME[=VALUE]", action="append", default=[], help=_ENV_HELP)
    own.add_argument("--detach", action="store_true", help="Return when the job was accepted, and print its id.")
    own.add_argument(
        "--no-wait",
        action="store_true",
        help="An error at once if the job does not fit now, as always without a master.",
    )
    add_ship(own)
    own.add_argument("--preload", metavar="MODULE[,MODULE]", action="append", default=[], help=_PRELOAD_HELP)
    own.add_argument("--debugpy", type=at_least(1), metavar="PORT", help=DEBUGPY_HELP)
    own.add_argument("--hang-timeout", type=at_least(0.1), metavar="S", help=_HANG_HELP)
    own.add_argument("--prefix", choices=("auto", "always", "never"), default="auto", help=_PREFIX_HELP)
    return parser


def quick_spec(
    parsed: Namespace,
    parser: ArgumentParser,
    name: str,
    driver: Driver,
    env: Mapping[str, str],
) -> JobSpec | None:
    """Return the job; None if the command line or the environment has anything out of the ordinary."""
    if env.get(WORKING_DIR) or any(_may_be_option(variable) for variable, value in env.items() if value):
        return None
    is_plain = all(value == parser.get_default(key) for key, value in vars(parsed).items() if key not in _USED)
    entry = _entry_point(parsed)
    lowest, _, highest = parsed.nnodes.partition(":")
    num_nodes, per_node = _number(lowest), _number(parsed.nproc_per_node)
    is_plain = is_plain and parsed.role == "default" and highest in ("", lowest) and parsed.max_restarts >= 0
    if not (is_plain and entry and num_nodes and per_node):
        return None
    return JobSpec(
        name=check_job_name(name),
        roles=[_role(entry, num_nodes * per_node, per_node, parsed.max_restarts, driver.env)],
        node_num=num_nodes,
        device_per_node=per_node,
        may_share_nodes=True,
        failover_exec=2,
        user_config=_NO_CONFIG,
        working_dir=driver.working_dir,
        sys_path=driver.sys_path,
        submitted_by=driver.submitted_by,
    )


def _role(entry: EntryPoint, total: int, per_node: int, max_restarts: int, env: Mapping[str, str]) -> RoleSpec:
    return RoleSpec(
        name=_ROLE,
        kind="elastic",
        entry_point=entry,
        total=total,
        per_group=per_node,
        resources=Resources(accelerator=1.0),
        envs=check_report_to(env),
        config=_NO_CONFIG,
        max_restart=max_restarts,
        role_max_restart=max_restarts,
        communication=Communication(pre_check=False, auto_setup=False),  # the script calls init_process_group itself
    )


def _may_be_option(variable: str) -> bool:
    return variable.startswith(("UNIFIED_", "DLROVER_UNIFIED_")) and variable not in _NOT_OPTIONS


def _number(text: str) -> int:
    """Return a plain number above 0; 0 for anything else."""
    return int(text) if text.isdecimal() else 0


def _entry_point(parsed: Namespace) -> EntryPoint | None:
    if not parsed.module and not parsed.training_script.endswith(".py"):
        return None
    kind: Literal["module", "script"] = "module" if parsed.module else "script"
    argv = [quoted_ports(word) for word in parsed.training_script_args]  # as torchrun, which knows no {port}
    return EntryPoint(kind=kind, target=parsed.training_script, argv=argv)


def full_spec(
    arguments: Namespace,
    parser: ArgumentParser,
    name: str,
    driver: Driver,
    master: str | None = None,
    hang_timeout: float | None = None,
) -> tuple[JobSpec, JobConfig]:
    """Return the job as the models make it, and its options, including those from the environment."""
    from unified.api.builder.builder import DLJobBuilder
    from unified.api.builder.launcher import describe
    from unified.client.submission import cluster_nodes
    from unified.job.options import submit_options
    from unified.job.to_spec import to_spec

    builder = DLJobBuilder().skip_node_check()
    counts_nodes = not arguments.nproc_per_node.isdecimal()
    describe(builder, arguments, parser, "torchrun", cluster_nodes(master) if master and counts_nodes else None)
    given = {"job_name": name} if hang_timeout is None else {"job_name": name, "hang_timeout": hang_timeout}
    config = submit_options(builder.build(), given, os.environ)
    if "failover_exec_strategy" not in config.model_fields_set:
        config = config.model_copy(update={"failover_exec_strategy": 2})  # --max-restarts is the one limit
    return to_spec(config, driver), config
