"""``unified key new``, ``show`` and ``rotate``: the file that makes hosts one cluster."""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser
from pathlib import Path

from unified.cli.options import at_least
from unified.errors import UsageError
from unified.security.keys import KEY_VARIABLE, current, default_key_file, load_key, rotate_key, time_text, write_key

_MOST_S = 30 * 86400
_FILE = f"The key file; else ${KEY_VARIABLE}, else ~/.config/unified/cluster.key."


def new_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", type=Path, metavar="PATH", help=_FILE)


show_arguments = new_arguments


def rotate_arguments(parser: ArgumentParser) -> None:
    new_arguments(parser)
    text = "Time until the new key is the cluster's, in seconds (3600). By then each host has a copy of the file."
    parser.add_argument("--in", dest="in_s", type=at_least(0.0), default=3600.0, metavar="S", help=text)


def new(path: Path | None) -> None:
    """Make a new cluster key, in a file that only you may read.

    Copy it to every host: the master's, the agents', and those from which jobs are submitted.
    """
    from unified.security.curve import new_key

    file = _file(path)
    made = new_key()
    write_key(file, made)
    print(f"{file}  {made.fingerprint}")
    print("Copy this file to every host of the cluster, to the same place there; its mode has to stay 0600.")
    if file != default_key_file():
        print(f"Name it with {KEY_VARIABLE}={file}, for the daemons and for everybody who submits jobs.")


def show(path: Path | None) -> None:
    """Print the fingerprint of the cluster key, which has to be the same on every host. The key itself is not shown."""
    file = _file(path)
    key = current(load_key(file))
    print(f"{file}  {key.fingerprint}")
    if key.successor is not None:
        print(f"from {time_text(key.replaced_at)} on  {key.successor.fingerprint}")


def rotate(path: Path | None, in_s: float) -> None:
    """Add a new key to the key file, which replaces the present one after a while, without stopping the cluster.

    Copy the file to every host again, over the old one: daemons that run read it within seconds, and tell their
    workers. Until the time comes both files are taken, after it the old one is refused. Connections that stand are not
    cut. Start the master again after that time, under its running jobs: it listens with the old pair until then.
    """
    from unified.security.curve import new_key

    if in_s > _MOST_S:
        raise UsageError(f"--in {in_s:g} is too long: {_MOST_S} (30 days) at most.")
    file = _file(path)
    made, replaced_at = new_key(), float(int(time.time() + in_s))
    replaced = rotate_key(file, made, replaced_at)
    when = time_text(replaced_at)
    print(f"{file}  {replaced.fingerprint}, and from {when} on {made.fingerprint}")
    print(f"Copy this file to every host of the cluster before {when}; a host without it is refused from then on.")
    print("After that time start the master again (jobs run on), and `unified key show` shows the new key alone.")


def _file(path: Path | None) -> Path:
    return Path(os.path.abspath(path or os.environ.get(KEY_VARIABLE) or default_key_file()))
