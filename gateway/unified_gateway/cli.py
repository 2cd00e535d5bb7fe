"""`unified-gateway`: flags and environment to options, then the server."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from unified import process
from unified.config.addresses import MAX_PORT, named_master
from unified.config.logging import log_to_stderr, logging_level
from unified.errors import UnifiedError, UsageError
from unified.sd_notify import ServiceNotifier
from unified_gateway.options import BACKENDS, GatewayOptions
from unified_gateway.page.guard import PageOptions
from unified_gateway.tokens import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, Tokens

DEFAULT_PORT = 8000
MIN_TICKET = 32
"""Fewest characters of a ticket."""
CANNOT_SERVE = 2
"""Exit code, the same as argparse's, for an error that a restart would not mend."""

_log = logging.getLogger("unified.gateway")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="unified-gateway",
        description="Serves the training API over HTTP: POST /train runs a job on the cluster.",
        epilog=f"Each client shows a token in the header X-TRAINER-TOKEN: that of {TOKEN_VARIABLE}, or one of the "
        "token file. Without any token the gateway listens on loopback alone.",
    )
    add = parser.add_argument
    add("--master", metavar="tcp://HOST:PORT",
        help="the master (default: UNIFIED_MASTER, else a cluster of this host while the gateway runs)")  # fmt: skip
    add("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1)")
    add("--port", type=_port, default=DEFAULT_PORT, help=f"0 takes any free one (default: {DEFAULT_PORT})")
    add("--uds", type=Path, metavar="PATH",
        help="listen on this Unix socket, which its owner alone can open, in place of --host and --port")  # fmt: skip
    add("--tls-cert", type=Path, metavar="FILE", help="serve HTTPS with this certificate file, including its chain")
    add("--tls-key", type=Path, metavar="FILE", help="its private key (default: in the file of the certificate)")
    add("--behind-proxy", action="store_true",
        help="a proxy before the gateway serves HTTPS, and passes the header Host on")  # fmt: skip
    add("--allow-host", action="append", default=[], metavar="NAME",
        help="further name of this host that browsers open the page by")  # fmt: skip
    add("--read-only", action="store_true", help="nobody changes anything from the page")
    add("--ticket-fd", type=int, metavar="N",
        help="serve only the page, to the browser that shows the ticket in this descriptor")  # fmt: skip
    add("--grpc-port", type=_port, metavar="PORT", help="serve the coordinator over gRPC there, for other languages")
    add("--token-file", type=Path, metavar="FILE",
        help=f"lines `name: token` (default: {TOKEN_FILE_VARIABLE})")  # fmt: skip
    add("--backend", choices=BACKENDS, help="what runs the jobs (default: TRAINER_API_BACKEND, else master)")
    add("--namespace", action="append", metavar="NAME",
        help="namespace of Kubernetes that jobs may be in; the first is the default one")  # fmt: skip
    add("--nodes", type=int, metavar="N", help="agents of the cluster of this host (default: 1)")
    add("--devices", type=int, metavar="N", help="virtual devices of each (default: this host's accelerators, or 8)")
    add("--address-file", type=Path, metavar="FILE", help="write http://HOST:PORT here once the gateway is ready")
    add("--die-with-parent", nargs="?", type=int, const=0, metavar="PID",
        help="end when the process that started this one ends, or if PID is not its parent now")  # fmt: skip
    add("--log-level", choices=["debug", "info", "warning", "error"],
        help="one of debug, info, warning, error (default: UNIFIED_LOG_LEVEL, else info)")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the gateway and return its exit code."""
    arguments = build_parser().parse_args(argv)
    if arguments.die_with_parent is not None:
        process.die_with_parent(signal.SIGTERM, arguments.die_with_parent or os.getppid())
    process.set_title("unified-gateway")
    try:
        notifier = ServiceNotifier(os.environ, is_helper=arguments.die_with_parent is not None)
        log_to_stderr("gateway", logging_level(arguments.log_level, os.environ))
        options = _options(arguments)
        tokens = Tokens.load(options.token_file)
        if arguments.uds is None:
            tokens.check_listening("unified-gateway", arguments.host)
        if arguments.tls_key is not None and arguments.tls_cert is None:
            raise UsageError("--tls-key needs --tls-cert.")
        from unified_gateway.server import Listening, run_server

        listening = Listening(
            arguments.host,
            arguments.port,
            arguments.address_file,
            uds=arguments.uds,
            tls_cert=arguments.tls_cert,
            tls_key=arguments.tls_key,
            is_printed=arguments.ticket_fd is not None,
        )
        return run_server(options, tokens, listening, notifier, _page(arguments, options))
    except ImportError as error:
        print(f"unified-gateway needs {error.name}: pip install 'unified-runtime[http]'.", file=sys.stderr)
        return CANNOT_SERVE
    except UsageError as error:
        print(f"unified-gateway: {error}", file=sys.stderr)
        return CANNOT_SERVE
    except (UnifiedError, OSError, ValueError) as error:
        print(f"unified-gateway: {error}", file=sys.stderr)
        return 1


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: a number from 0 to {MAX_PORT}")
    return int(text)


def _bind(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _page(arguments: argparse.Namespace, options: GatewayOptions) -> PageOptions | None:
    """Return the options of the page. If it is not served, log the reason and return None."""
    ticket = ""
    if arguments.ticket_fd is not None:
        with open(arguments.ticket_fd, encoding="ascii", closefd=True) as pipe:
            ticket = pipe.read().strip()
        if len(ticket) < MIN_TICKET:
            raise UsageError(f"the ticket in descriptor {arguments.ticket_fd} is too short.")
    page = PageOptions(
        host="" if arguments.uds is not None else arguments.host,
        hosts=frozenset(arguments.allow_host),
        has_tls=arguments.tls_cert is not None,
        is_behind_proxy=arguments.behind_proxy,
        is_read_only=arguments.read_only,
        ticket=ticket,
    )
    hindrance = page.hindrance
    if options.backend != "master":
        hindrance = f"the page shows only clusters of our own master, but jobs go to {options.backend}."
    if not hindrance:
        return page
    if ticket:
        raise UsageError(hindrance)
    _log.warning("event=page-off reason=%r", hindrance)
    return None


def _options(arguments: argparse.Namespace) -> GatewayOptions:
    options = GatewayOptions.from_environment()
    given = {
        "master": named_master(arguments.master),
        "backend": arguments.backend,
        "token_file": arguments.token_file,
        "namespaces": tuple(arguments.namespace) if arguments.namespace else None,
        "nodes": arguments.nodes,
        "devices": arguments.devices,
        "grpc_bind": None if arguments.grpc_port is None else _bind(arguments.host, arguments.grpc_port),
    }
    return replace(options, **{name: value for name, value in given.items() if value is not None})
