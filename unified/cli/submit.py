"""``unified submit FILE.py[:NAME]``: submit a job that a Python file describes."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from argparse import ArgumentParser
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

from unified.cli.options import (
    DEBUGPY_HELP,
    NAME_HELP,
    NO_CLUSTER_TO_LEAVE,
    add_master,
    add_ship,
    at_least,
    begin_cluster,
    chosen_name,
    outcome,
)
from unified.client.preload import guess_of
from unified.config.addresses import find_master
from unified.errors import UnifiedError, UsageError, nearest
from unified.job import by_value
from unified.job.driver import DEBUGPY

DEFAULT_NAMES = ("job", "build")
MODULE = "unified_job_file"


def submit_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE.py[:NAME]",
        help="A file with a job: a DLJob, a builder, or a function that returns one, called NAME "
        "('job' or 'build' if not said).",
    )
    add_master(parser)
    parser.add_argument("--name", help=NAME_HELP)
    parser.add_argument(
        "--no-wait", action="store_true", help="An error at once if it does not fit now, as always without a master."
    )
    parser.add_argument("--detach", action="store_true", help="Return when it was accepted, and print its id.")
    add_ship(parser)
    parser.add_argument("--debugpy", type=at_least(1), metavar="PORT", help=DEBUGPY_HELP)


def submit(
    file: str,
    master: str | None,
    name: str | None,
    no_wait: bool,
    detach: bool,
    ship: bool,
    exclude: list[str],
    debugpy: int | None,
) -> int:
    """Submit the job of a file, and show it until it has ended. The exit code is the job's."""
    if detach and find_master(master) is None:
        raise UsageError(NO_CLUSTER_TO_LEAVE)
    if debugpy:
        os.environ[DEBUGPY] = str(debugpy)
    with ExitStack() as stack:
        text = path.read_text(errors="replace") if (path := _parts(file)[0]).is_file() else ""
        if find_master(master) is None and text and ".preload(" not in text:  # else only the job says what to import
            stack.callback(begin_cluster(guess_of(text)))  # the import may take seconds
        job = load_job(file)
        options: dict[str, object] = {"master": master} if master else {}
        if no_wait:
            options["wait"] = False
        if ship:
            options["ship"] = True
        if exclude:
            options["exclude"] = exclude
        called = chosen_name(name, str(_parts(file)[0]), os.environ)
        return outcome(job.submit(called, blocking=not detach, **options))


def load_job(text: str) -> Any:
    """Return the job that ``FILE.py[:NAME]`` names: an object with `submit`."""
    path, wanted = _parts(text)
    if not path.is_file():
        raise UsageError(f"{path} is not a file: give a Python file that describes a job.")
    found = _look_up(_load(path), path, wanted)
    if not hasattr(found, "submit") and not hasattr(found, "build") and callable(found):
        found = _run_user_code(found, path)
    if not hasattr(found, "submit") and hasattr(found, "build"):
        found = _run_user_code(found.build, path)
    if not hasattr(found, "submit"):
        raise UsageError(
            f"{text} is of type {type(found).__name__}, not a DLJob, a builder, or a function that returns one."
        )
    return found


def _parts(text: str) -> tuple[Path, str]:
    """Return the file, and the name in it or an empty text."""
    path, _, name = text.rpartition(":")
    return (Path(path), name) if path.endswith(".py") else (Path(text), "")


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file: its name must end with .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    by_value.programs.add(MODULE)
    sys.path.insert(0, str(path.resolve().parent))  # path and arguments as `python FILE.py` has them
    sys.argv = [str(path)]
    loader = spec.loader
    _run_user_code(lambda: loader.exec_module(module), path)
    return module


def _look_up(module: ModuleType, path: Path, wanted: str) -> object:
    names = [wanted] if wanted else DEFAULT_NAMES
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    public = [name for name in vars(module) if not name.startswith("_")]
    if wanted:
        raise UsageError(f"{path} has no {wanted!r}.{nearest(wanted, public)}")
    raise UsageError(
        f"{path} defines neither 'job' nor 'build': call the job one of them, or write {path}:NAME. "
        "A plain script runs with `unified run`, on SLURM with `unified slurm run`."
    )


def _run_user_code(function: Any, path: Path) -> Any:
    """Call a function of the user; its error becomes one line that says where it happened."""
    try:
        return function()
    except UnifiedError:
        raise
    except SyntaxError as error:
        raise UsageError(f"{error.filename}:{error.lineno}: {error.msg}.") from None
    except Exception as error:
        file = path.absolute()  # as importlib names it
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
        where = f"{path}:{frames[-1].lineno}" if frames else str(path)
        raise UsageError(f"{where}: {type(error).__name__}: {error}") from error
