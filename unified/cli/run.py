"""``unified run``: a script as torchrun would run it, on a cluster.

Its own options stand before the script, among torchrun's; everything after the script is the script's.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence

from msgspec import structs

from unified.api.builder.torchrun import table_parser
from unified.api.builder.torchrun_hosts import check_hosts, common_key
from unified.cli.naming import NAME_HELP, chosen_name
from unified.cli.outcome import NO_CLUSTER_TO_LEAVE, outcome
from unified.cli.quick import quick_spec
from unified.config.addresses import find_master
from unified.errors import UsageError
from unified.job.driver import Driver
from unified.job.driver_environment import asked_for, passed_on
from unified.job.spec import JobSpec

_OWN = ("master", "name", "detach", "no_wait", "env", "prefix")
_ENV_HELP = "A variable of the workers, several times if need be; without a value, this shell's."
_MASTER_HELP = "The master's address; else $UNIFIED_MASTER; else a cluster of its own on this host, for the job's life."
_PREFIX_HELP = (
    "Put [ROLE-RANK] before each line that a worker prints; auto: on a terminal. To files goes what was printed, and "
    "nothing else."
)


def run(argv: Sequence[str]) -> int:
    """Run it; the exit code.

    Raises:
        UsageError, ClusterError: as `DLJob.submit`.
        SystemExit: ``--help``.
    """
    parser = run_parser(os.environ)
    arguments = parser.parse_args(list(argv))
    own = {name: vars(arguments).pop(name) for name in _OWN}
    master = find_master(own["master"])
    if own["detach"] and master is None:
        raise UsageError(NO_CLUSTER_TO_LEAVE)
    check_hosts(arguments, parser.prog, has_master=master is not None)
    key = common_key(arguments)
    name = chosen_name(own["name"], arguments.training_script, os.environ, key=key)
    driver = _driver(arguments, own["env"], is_on_cluster=master is not None)
    waits = not own["no_wait"]
    spec = quick_spec(arguments, parser, name, driver, os.environ)
    if spec is None:
        spec, may_wait = full_spec(arguments, parser, name, driver, master)
        waits = waits and may_wait
    from unified.client.submission import submit_job
    from unified.client.terminal import own_stdin

    if not own["detach"]:
        spec = structs.replace(spec, stdin=own_stdin())
    return outcome(
        submit_job(spec, master=master, blocking=not own["detach"], wait=waits, joins=bool(key), prefix=own["prefix"])
    )


def _driver(arguments: Namespace, asked: Sequence[str], *, is_on_cluster: bool) -> Driver:
    """Return what workers take from this process: a script brings its own folder, and `-m` looks where it was typed."""
    env: dict[str, str] = {}
    if is_on_cluster:  # the workers of an embedded cluster have it all
        env, withheld = passed_on(os.environ)
        if left := [name for name in withheld if name not in asked]:
            names = ", ".join(left)
            print(
                f"unified run: not sent to the cluster, being credentials (--env NAME sends one): {names}",
                file=sys.stderr,
            )
    here = Driver.here()
    return here._replace(
        sys_path=[os.getcwd()] if arguments.module else [], env={**here.env, **env, **asked_for(asked, os.environ)}
    )


def run_parser(env: Mapping[str, str]) -> ArgumentParser:
    """torchrun's options and our own."""
    parser = table_parser("torchrun", env, "unified run")
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
    own.add_argument("--prefix", choices=("auto", "always", "never"), default="auto", help=_PREFIX_HELP)
    return parser


def full_spec(
    arguments: Namespace,
    parser: ArgumentParser,
    name: str,
    driver: Driver,
    master: str | None = None,
) -> tuple[JobSpec, bool]:
    """The job as the models make it, options from the environment included, and whether it may wait for its place."""
    from unified.api.builder.builder import DLJobBuilder
    from unified.api.builder.launcher import describe
    from unified.client.submission import cluster_nodes
    from unified.job.options import submit_options
    from unified.job.to_spec import to_spec

    builder = DLJobBuilder().skip_node_check()
    counts_nodes = not arguments.nproc_per_node.isdecimal()
    describe(builder, arguments, parser, "torchrun", cluster_nodes(master) if master and counts_nodes else None)
    config = submit_options(builder.build(), {"job_name": name}, os.environ)
    if "failover_exec_strategy" not in config.model_fields_set:
        config = config.model_copy(update={"failover_exec_strategy": 2})  # --max-restarts is the one limit
    return to_spec(config, driver), config.wait
