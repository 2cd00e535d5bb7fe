"""``python -m unified.compat [--force] script.py [args]``: run a script as Python does, with upstream's names.

The script is `__main__`, its folder is first on `sys.path`, and `sys.argv` is its own. With ``-m pkg.mod`` in its place
a module is run, as by ``python -m``, and the current directory is first on `sys.path`. ``UNIFIED_COMPAT`` is set, so
that the workers of its job, and the processes that it starts, have the aliases too.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader
from pathlib import Path
from types import CodeType, ModuleType

from unified import compat


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script that the command line names. Its exceptions, also SystemExit, pass through."""
    parser = argparse.ArgumentParser(
        prog="python -m unified.compat",
        description="Run a script that imports dlrover.python.unified or dtruntime, on Unified.",
    )
    parser.add_argument("--force", action="store_true", help="even where a dlrover or dtruntime is installed")
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT.py is a module, as with `python -m`")
    parser.add_argument("target", metavar="SCRIPT.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="what the script is given")
    given = parser.parse_args(arguments)
    os.environ[compat.VARIABLE] = "force" if given.force else "1"
    compat.apply(os.environ)
    if not given.force:
        for name, where in compat.found_installed().items():
            print(f"unified.compat: {name} is installed ({where}) and is used; --force puts Unified in its place.",
                  file=sys.stderr)  # fmt: skip
    (run_module if given.is_module else run)(given.target, given.arguments)


def run(script: str, arguments: list[str]) -> None:
    """Make the script this process's `__main__`, and run it."""
    path = Path(script).absolute()
    try:
        code = compile(path.read_bytes(), script, "exec", dont_inherit=True)
    except OSError as error:
        sys.exit(f"unified.compat: {script} cannot be read: {error.strerror}.")
    module = ModuleType("__main__")
    module.__file__ = str(path)
    if not sys.flags.safe_path:
        sys.path[0] = str(path.resolve().parent)  # `-m` has put the current directory there
    _become(module, code, [script, *arguments])


def run_module(name: str, arguments: list[str]) -> None:
    """Make the module, or the ``__main__`` of the package, this process's `__main__`, and run it."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:  # one of its parent packages is missing
        sys.exit(f"unified.compat: {error}")
    code = spec.loader.get_code(spec.name) if spec is not None and isinstance(spec.loader, InspectLoader) else None
    if spec is None or code is None:
        sys.exit(
            f"unified.compat: there is no module {name} that can be run: neither {name}.py nor {name}/__main__.py."
        )
    module = ModuleType("__main__")
    module.__file__ = spec.origin
    module.__spec__ = spec  # `multiprocessing` needs it to find the module again
    module.__package__ = spec.parent
    module.__loader__ = spec.loader
    _become(module, code, [spec.origin or name, *arguments])


def _become(module: ModuleType, code: CodeType, argv: list[str]) -> None:
    sys.modules["__main__"] = module
    sys.argv = argv
    exec(code, module.__dict__)


if __name__ == "__main__":
    main()
