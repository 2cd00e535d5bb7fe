"""All subcommands under one typer application."""

from __future__ import annotations

from typing import Annotated, cast

import typer

from unified.cli import call, explain, jobs, key, logs, nodes, status, stop, submit
from unified.cli.main import release

WrongUsage = cast("type[typer.BadParameter]", typer.BadParameter.__base__)
"""Every mistake on a command line. typer has no public name for it, and newer releases bring a click of their own."""


def build() -> typer.Typer:
    """The application; `unified.cli.main` calls it."""
    app = typer.Typer(
        name="unified",
        help="Run distributed training and reinforcement-learning jobs, and look at them.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_top)
    app.command("submit")(submit.submit)
    app.command("run", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(_run)
    app.command("jobs")(jobs.jobs)
    app.command("status")(status.status)
    app.command("logs")(logs.logs)
    app.command("stop")(stop.stop)
    app.command("nodes")(nodes.nodes)
    app.command("explain")(explain.explain)
    app.command("call")(call.call)
    app.add_typer(key.key(), name="key")
    return app


def execute(words: list[str]) -> int:
    """Run one command line; the exit code.

    typer's own `main` is gone round, because it turns Ctrl-C and a closed pipe into exit code 1.
    """
    command = typer.main.get_command(build())
    try:
        with command.make_context("unified", words) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except WrongUsage as error:
        error.show()
        return 2
    return 0


def _top(
    version: Annotated[bool, typer.Option("--version", help="Print the release and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"unified-runtime {release()}")
        raise typer.Exit


def _run(context: typer.Context) -> None:
    """Run a script as torchrun would: unified run --nproc-per-node=2 train.py …"""
    from unified.cli.run import run

    raise typer.Exit(run(context.args))
