"""Virtual environments with the requirements of jobs, on top of the packages of the agent's own interpreter.

    python -m unified.client.code.environment FD --digest HEX --file REQUIREMENTS --into FOLDER

The agent of a node starts this with its own interpreter; the last line of its output says what failed. It uses pip,
not uv: pip sees the packages of the agent's interpreter, so that torch is not installed a second time.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import site
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

from unified import process
from unified.client.code.archive import make_content_read_only
from unified.client.code.transfer import POLL_S, holding, make_room
from unified.config.settings import for_user_alone, remove_folder

KEPT_BYTES = 16 << 30
MARK = "complete"


def make(folder: Path, requirements: Path) -> str:
    """Make a read-only environment with the requirements, and return the error; empty: there was none."""
    remove_folder(folder)  # left by a process that was killed
    has_pip = importlib.util.find_spec("pip") is not None  # can also install into the new environment
    venv.create(folder, with_pip=not has_pip, symlinks=True)
    scheme = {"base": str(folder), "platbase": str(folder)}
    own = Path(sysconfig.get_path("purelib", "venv", scheme))
    below = [path for path in (*site.getsitepackages(), site.getusersitepackages()) if os.path.isdir(path)]
    lines = [f"import site; site.addsitedir({path!r})\n" for path in below]
    (own / "unified_agent_packages.pth").write_text("".join(lines))
    python = str(folder / "bin/python")
    pip = [sys.executable, "-m", "pip", "--python", python] if has_pip else [python, "-m", "pip"]
    log = folder.with_name(f"{folder.name}.log")
    with open(log, "w", opener=for_user_alone) as output:
        done = subprocess.run(
            [*pip, "install", "--disable-pip-version-check", "--no-input", "--requirement", str(requirements)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode == 0:
        make_content_read_only(folder)  # later jobs use it too
        (folder / MARK).touch()
        folder.chmod(0o555)
        return ""
    said = log.read_text(errors="replace").splitlines()
    errors = [line for line in said if line.startswith("ERROR:")]
    return (errors or said or ["pip said nothing"])[-1].removeprefix("ERROR: ")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m unified.client.code.environment", description="Installs packages.")
    parser.add_argument("fd", type=int, metavar="FD", help="socket to the agent, which stays unused")
    parser.add_argument("--parent", type=int, help="pid of the agent")
    parser.add_argument("--digest", required=True, metavar="HEX")
    parser.add_argument("--file", required=True, type=Path, metavar="REQUIREMENTS")
    parser.add_argument("--into", required=True, type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: os.killpg(0, signal.SIGKILL))  # also kills pip
    process.die_with_parent(signal.SIGTERM, arguments.parent)
    folder: Path = arguments.into / arguments.digest
    try:
        while not (folder / MARK).exists():
            with holding(arguments.into, arguments.digest) as is_held:
                if not is_held:
                    time.sleep(POLL_S)
                elif not (folder / MARK).exists():  # no other process was faster
                    make_room(arguments.into, KEPT_BYTES)
                    try:
                        if fault := make(folder, arguments.file):
                            print(f"what the job requires cannot be installed: {fault}")
                            return 1
                    finally:
                        if not (folder / MARK).exists():
                            remove_folder(folder)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"the environment of the job cannot be made in {arguments.into}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
