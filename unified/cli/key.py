"""``unified key new`` and ``unified key show``: the file that makes hosts one cluster."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from pathlib import Path

from unified.security.keys import KEY_VARIABLE, default_key_file, load_key, write_key

_FILE = f"The key file; else ${KEY_VARIABLE}, else ~/.config/unified/cluster.key."


def new_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", type=Path, metavar="PATH", help=_FILE)


show_arguments = new_arguments


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
        print(f"Name it with {KEY_VARIABLE}={file}, for daemons and for whoever submits jobs.")


def show(path: Path | None) -> None:
    """Print the fingerprint of the cluster key, which has to be the same on every host. The key itself is not shown."""
    file = _file(path)
    print(f"{file}  {load_key(file).fingerprint}")


def _file(path: Path | None) -> Path:
    return Path(os.path.abspath(path or os.environ.get(KEY_VARIABLE) or default_key_file()))
