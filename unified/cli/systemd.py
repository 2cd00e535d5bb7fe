"""``unified systemd install``: the units of the daemons, written where systemd looks for them.

The units are the files of ``deploy/systemd`` (in a wheel: ``unified/units``), with the paths of this installation.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from argparse import ArgumentParser
from pathlib import Path
from typing import NamedTuple

from unified.config.addresses import parse_flag
from unified.errors import UsageError

ROLES = ("master", "agent", "gateway")
PROGRAMS = Path("/opt/unified/bin")
"""Folder of the programs in the files before it is replaced."""
_CODE = Path(__file__).parents[1]
_FILES = _CODE / "units" if (_CODE / "units").is_dir() else _CODE.parent / "deploy/systemd"
_ROOT = Path("/")
_HOME_FOLDERS = tuple(map(Path, ("/home", "/root", "/run/user")))
_MASTER = re.compile(r"^UNIFIED_MASTER=.*$", re.MULTILINE)


class UnitFile(NamedTuple):
    path: Path
    text: str
    is_settings: bool
    """True: once the file exists, it belongs to the operator; only the master's address in it is changed."""


def install_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--role", choices=ROLES, required=True, help="The daemon that this host is to run.")
    parser.add_argument("--master", metavar="tcp://HOST:PORT", help="The master's address, for an agent or a gateway.")
    parser.add_argument("--user", action="store_true", help="An agent of your own systemd; without root.")
    parser.add_argument("--print", dest="only_prints", action="store_true", help="Print the files, and write none.")


def install(role: str, master: str | None, user: bool, only_prints: bool) -> None:
    """Write the unit of a daemon and its settings for systemd, and say what to do next.

    The daemon is the one of this installation. Settings that are there stay as they are, but for the address of the
    master if --master gives one; all else is written anew.
    """
    if user and role != "agent":
        raise UsageError(f"--user is for agents only: a {role} serves other hosts, so it has to be a system service.")
    if master is not None and role == "master":
        raise UsageError("--master names the master of an agent or a gateway; a master listens where --bind says.")
    address = None if master is None else parse_flag("--master", master).url
    programs = Path(sysconfig.get_path("scripts"))
    if not os.access(programs / f"unified-{role}", os.X_OK):
        raise UsageError(f"no program {programs}/unified-{role}: {sys.executable} -m pip install unified-runtime.")
    paths = _program_paths(programs)
    is_below_home = any(place.is_relative_to(home) for place in paths for home in _HOME_FOLDERS)
    files = render(role, programs, address, is_user=user, is_below_home=is_below_home)
    if only_prints:
        sys.stdout.write("\n".join(f"# {file.path}\n{file.text}" for file in files))
        return
    if not user and os.geteuid() != 0:
        raise UsageError(
            f"units of the system are written by root: `sudo {sys.argv[0]} systemd install …`. --user installs an "
            "agent of your own, and --print writes nothing."
        )
    if role == "agent" and address is None and not files[-1].path.exists():
        raise UsageError(f"no master: give --master tcp://HOST:PORT, which goes into {files[-1].path}.")
    if not user:
        _check_reach(paths)
    was_there = files[0].path.exists()
    for file in files:
        sys.stdout.write(f"{_write(file, address)} {file.path}\n")
    lines = _next(role, programs, is_user=user, was_there=was_there)
    sys.stdout.write("\n".join(["", "Next:" if user else "Next, as root:", *(f"  {line}" for line in lines), ""]))


def render(
    role: str,
    programs: Path = PROGRAMS,
    master: str | None = None,
    *,
    is_user: bool = False,
    is_below_home: bool = False,
) -> list[UnitFile]:
    """Return the files of a role with their paths; the last one has its settings.

    Args:
        is_below_home: True if the programs are below a home folder: then the sandbox lets the daemon read home folders.
    """
    unit, settings = f"unified-{role}.service", f"{role}.env"
    if is_user:
        config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        paths = {f"user/{unit}": config / "systemd/user" / unit, f"user/{settings}": config / "unified" / settings}
    else:
        paths = {
            unit: _ROOT / "etc/systemd/system" / unit,
            "unified.sysusers": _ROOT / "etc/sysusers.d/unified.conf",
            "unified.tmpfiles": _ROOT / "etc/tmpfiles.d/unified.conf",
            settings: _ROOT / "etc/unified" / settings,
        }
    files = []
    for name, path in paths.items():
        text = (_FILES / name).read_text().replace(str(PROGRAMS), str(programs))
        if is_below_home:
            text = text.replace("ProtectHome=yes", "ProtectHome=read-only")
        files.append(UnitFile(path, _with_master(text, master), path.suffix == ".env"))
    return files


def _with_master(text: str, master: str | None) -> str:
    return text if master is None else _MASTER.sub(f"UNIFIED_MASTER={master}", text)


def _program_paths(programs: Path) -> list[Path]:
    """Return the folders without which a daemon cannot start: its program, its interpreter, its code."""
    return [programs, Path(sys.executable).resolve().parent, Path(sys.base_prefix), _CODE]


def _check_reach(paths: list[Path]) -> None:
    """Raise UsageError if another user than root cannot enter one of the folders."""
    for folder in (above for place in paths for above in (*reversed(place.parents), place)):
        if not folder.stat().st_mode & 0o001:
            raise UsageError(
                f"the daemons run as user unified, which cannot enter {folder}, a part of this installation: "
                "install unified-runtime elsewhere, as in /opt/unified (`python3 -m venv /opt/unified`)."
            )


def _write(file: UnitFile, master: str | None) -> str:
    """Write a file if it changes; return a word for what was done."""
    before = file.path.read_text() if file.path.exists() else None
    text = file.text if before is None or not file.is_settings else _with_master(before, master)
    if text == before:
        return "kept" if file.is_settings else "unchanged"
    file.path.parent.mkdir(parents=True, exist_ok=True)
    part = file.path.with_name(f".{file.path.name}.{os.getpid()}")
    part.write_text(text)
    part.chmod(0o600 if file.is_settings else 0o644)  # settings may have a token
    part.replace(file.path)
    return "wrote" if before is None else "changed"


def _next(role: str, programs: Path, *, is_user: bool, was_there: bool) -> list[str]:
    """Return the commands that the operator still has to run.

    Args:
        was_there: True if the unit existed before: its daemon may run with the old unit and settings.
    """
    unit, key = f"unified-{role}", _ROOT / "etc/unified/cluster.key"
    start = (
        f"restart {unit}     # if it runs: it has the old unit and settings" if was_there else f"enable --now {unit}"
    )
    if is_user:
        linger = f"loginctl enable-linger {os.environ.get('USER', '$USER')}     # else it ends when you log out"
        return ["systemctl --user daemon-reload", f"systemctl --user {start}", linger]
    of_master = f"{programs / 'unified'} key new {key}     # once for the cluster; copy it to the other hosts"
    of_others = f"scp MASTER-HOST:{key} {key} && chmod 600 {key}"
    lines = ["systemd-sysusers", "systemd-tmpfiles --create unified.conf", "systemctl daemon-reload"]
    lines += [] if key.exists() else [of_master if role == "master" else of_others]
    return [*lines, f"systemctl {start}", f"systemctl status {unit}"]
