"""``unified ui``: the web page, for the user who starts it, on loopback or on a Unix socket."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from unified.cli.options import add_master, at_least
from unified.client.connection import connect_master
from unified.client.terminal import ending_at_once
from unified.config import settings
from unified.errors import ClusterError
from unified.job.driver import submitter
from unified.protocol.client_master import JobList, ListJobs

CANNOT_SERVE = 2
"""Exit code of a gateway with wrong options or missing packages."""
STOP_WITHIN_S = 8.0
TUNNEL_PORT = 8265
"""Port on the user's own computer in the proposed ssh command for a tunnel to a Unix socket."""


def ui_arguments(parser: ArgumentParser) -> None:
    add_master(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--port", type=at_least(0), default=0, metavar="N", help="Port on loopback (default: a free one)."
    )
    where.add_argument("--uds", metavar="PATH", help="Listen on this Unix socket, which you alone can open.")
    parser.add_argument("--read-only", action="store_true", help="Change nothing from the page.")


def ui(master: str | None, port: int, uds: str | None, read_only: bool) -> int:
    """Show the cluster in a browser, until Ctrl-C: jobs, nodes, logs, curves, and why something waits.

    The URL that it prints signs one browser in, once, within 5 minutes. On a remote host it prints the ssh command,
    too, that brings the page to your own computer. It needs the extra `http`.
    """
    with connect_master(master) as connection:
        connection.ask(ListJobs(labels={"unified/none": ""}), JobList)  # raises without a master or the right key
        address = connection.address
    words = [settings.python(), "-P", "-m", "unified_gateway", "--master", address, "--log-level", "warning"]
    words += ["--uds", str(Path(uds).absolute())] if uds else ["--host", "127.0.0.1", "--port", str(port)]
    words += ["--ticket-fd", "0", "--die-with-parent", str(os.getpid()), *(["--read-only"] if read_only else [])]
    env = {name: text for name, text in os.environ.items() if not name.startswith("TRAINER_API_")}
    ticket = secrets.token_urlsafe(32)
    with ending_at_once(), _server(words, env) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError), process.stdin as pipe:  # the server has ended: its exit code says why
            pipe.write(ticket)
        if url := process.stdout.readline().strip():  # comes when the server is ready
            print("\n".join(lines(url, ticket, os.environ)), flush=True)
        code = process.wait()
    if code == CANNOT_SERVE:
        return code
    raise ClusterError(f"the page's server ended by itself, with exit code {code}; it says above why.")


@contextmanager
def _server(words: Sequence[str], env: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run the server in its own session: Ctrl-C at the terminal reaches only us, and we end the server in order."""
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(env), text=True, start_new_session=True
    )
    with process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()


def lines(url: str, ticket: str, env: Mapping[str, str]) -> list[str]:
    """Return the lines that tell where the page is."""
    _, _, path = url.partition("+unix://")
    port = str(TUNNEL_PORT) if path else url.rpartition(":")[2]
    there = path or f"127.0.0.1:{port}"
    open_at = f"http://127.0.0.1:{port}/#ticket={ticket}"
    connection = env.get("SSH_CONNECTION", "").split()
    advice = [f"the page: {open_at}  (once, within 5 minutes; Ctrl-C ends it)"]
    if path or len(connection) == 4:
        user = submitter().partition("@")[0]
        host = connection[2] if len(connection) == 4 else socket.gethostname()
        advice.insert(0, f"on your own computer, first: ssh -N -L {port}:{there} {user}@{host}")
    return advice
