"""``python -m unified.compat [--force] script.py [args]``: run a script as Python would, and have upstream's names.

The script is `__main__`, its folder is first on `sys.path`, and `sys.argv` is its own. ``UNIFIED_COMPAT`` is set, so
that the workers of its job, and processes that it starts, have the aliases too.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from unified import compat


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script that the command line names. What it raises, SystemExit too, goes through."""
    given = _parser().parse_args(arguments)
    os.environ[compat.VARIABLE] = "force" if given.force else "1"
    compat.apply(os.environ)
    if not given.force:
        for name, where in compat.found_installed().items():
            print(f"unified.compat: {name} is installed ({where}) and is used; --force puts Unified in its place.",
                  file=sys.stderr)  # fmt: skip
    run(given.script, [given.script, *given.arguments])


def run(script: str, argv: list[str]) -> None:
    """Make the script this process's `__main__`, and run it."""
    path = Path(script).absolute()
    try:
        code = compile(path.read_bytes(), script, "exec", dont_inherit=True)
    except OSError as error:
        sys.exit(f"unified.compat: {script} cannot be read: {error.strerror}.")
    module = ModuleType("__main__")
    module.__file__ = str(path)
    sys.modules["__main__"] = module
    sys.argv = argv
    if not sys.flags.safe_path:
        sys.path[0] = str(path.resolve().parent)  # where `-m` has put the current directory
    exec(code, module.__dict__)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m unified.compat",
        description="Run a script that imports dlrover.python.unified or dtruntime, on Unified.",
    )
    parser.add_argument("--force", action="store_true", help="even where a dlrover or dtruntime is installed")
    parser.add_argument("script", metavar="SCRIPT.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="what the script is given")
    return parser


if __name__ == "__main__":
    main()
