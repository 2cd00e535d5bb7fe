"""torchrun's way on several hosts, the same command on each: which commands are one job, and which are refused."""

from __future__ import annotations

from argparse import Namespace

from unified.errors import UsageError

_THIS_HOST = ("", "localhost", "127.0.0.1", "::1", "[::1]", "0.0.0.0")
_NO_ID = ("", "none")
_STATIC_PORT = 29500
"""torchrun's, where no other is given."""


def run_id(args: Namespace) -> str:
    """The id that `--rdzv-id` gives the run; empty without one."""
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


def check_hosts(args: Namespace, prog: str, *, has_master: bool, can_join: bool = True) -> None:
    """Refuse a command that would be a job of its own on each host.

    Args:
        has_master: the job goes to a master, which knows more hosts than this one.
        can_join: a command with a `common_key` joins the job that another host has submitted.

    Raises:
        UsageError: it would; the message says how the hosts become one job.
    """
    if not has_master:
        is_one_of_many = _lowest(args.nnodes) > 1 or (_highest(args.nnodes) > 1 and _names_other_host(args))
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


def _names_other_host(args: Namespace) -> bool:
    return _is_elsewhere(args.rdzv_endpoint) or _is_elsewhere(args.master_addr)


def _is_elsewhere(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    return (host if host and port.isdecimal() else endpoint) not in _THIS_HOST


def _lowest(nnodes: str) -> int:
    return _number(nnodes.partition(":")[0])


def _highest(nnodes: str) -> int:
    return _number(nnodes.rpartition(":")[2])


def _number(text: str) -> int:
    """Return the number that `text` is; 1 if it is none, which is refused later, where nodes are counted."""
    return int(text) if text.isdecimal() else 1
