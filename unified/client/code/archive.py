"""Archives of code: the files of a folder, packed by the submitter, and unpacked on each node of the job."""

from __future__ import annotations

import errno
import fnmatch
import gzip
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from io import BufferedRandom
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from unified.config.settings import remove_folder
from unified.errors import UsageError, listed
from unified.job.spec import ShippedCode

LIMIT_VARIABLE = "UNIFIED_SHIP_LIMIT"
LIMIT_MIB = 256.0
BLOCK = 1 << 20
MAX_NAMED = 5
JUNK = frozenset(
    """
    .git .hg .svn .venv venv __pycache__ node_modules .mypy_cache .pytest_cache .ruff_cache .tox .nox .ipynb_checkpoints
    .idea .vscode .DS_Store wandb mlruns
    """.split()  # noqa: SIM905
)
"""Names that are left out of a folder that git does not know."""
SECRETS = (".env", ".env.*", ".envrc", ".netrc", ".pypirc")
"""Files of passwords and tokens by their usual names: left out even if git does not ignore them."""


class CodeArchive:
    """A packed archive, in a file without a name, which is removed with this object.

    Attributes:
        code: its entry in the job's description.
        num_files: number of files in it.
        left_out: files of the folder that were left out because of `SECRETS`.
    """

    def __init__(self, code: ShippedCode, file: BinaryIO, num_files: int, left_out: Sequence[str] = ()) -> None:
        self.code = code
        self.num_files = num_files
        self.left_out = left_out
        self._file = file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()

    def read(self, offset: int) -> bytes:
        """Return the next bytes from `offset` on, at most `BLOCK`."""
        self._file.seek(offset)
        return self._file.read(BLOCK)


def pack(ship: bool | str | Sequence[str], exclude: Sequence[str] = (), folder: str | None = None) -> CodeArchive:
    """Pack the files of a folder that git tracks or does not ignore; without git, all but `JUNK`. Files of `SECRETS`
    are packed only if they are named.

    The same files always give the same bytes.

    Args:
        ship: True for `folder`, a path for another folder, or paths of the only files and folders in it to pack.
        exclude: patterns as in a shell, of names or of paths in the folder: ``*.ckpt``, ``data/raw``.
        folder: working directory of the job; None: that of this process.

    Raises:
        UsageError: there is no such file or folder, nothing is left to be packed, a link leads out of the folder, or
            the files have more than ``UNIFIED_SHIP_LIMIT`` MiB (256) together.
    """
    base = Path(folder or os.getcwd()).absolute()
    root = (base / ship if isinstance(ship, str) else base).resolve()
    if not root.is_dir():
        raise UsageError(f"ship={ship!r}: there is no folder {root}.")
    wanted = [] if isinstance(ship, bool | str) else [_within(root, base / each, each) for each in ship]
    names = sorted({name for name in _names(root, wanted) if not _is_excluded(name, exclude)})
    left_out = [name for name in names if name not in wanted and _is_excluded(name, SECRETS)]
    names = sorted({*names}.difference(left_out))
    _check(root, names)
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the archive's own
    try:
        digest = _write(root, names, file)
        code = ShippedCode(digest=digest, size=file.seek(0, os.SEEK_END), root=str(root))
    except BaseException:
        file.close()
        raise
    return CodeArchive(code, file, len(names), left_out)


def real_path(path: str, root: str) -> str:
    """Return a path that leads into the packed folder as a path without links; return other paths unchanged."""
    found = os.path.realpath(path)
    is_inside = os.path.isabs(path) and (found == root or found.startswith(f"{root.rstrip('/')}/"))
    return found if is_inside else path


def limit_bytes() -> int:
    """Return the most bytes that may be packed; UsageError: the variable is no number."""
    text = os.environ.get(LIMIT_VARIABLE) or str(LIMIT_MIB)
    try:
        return int(float(text) * (1 << 20))
    except (ValueError, OverflowError):
        raise UsageError(f"{LIMIT_VARIABLE}={text!r} is not a number of MiB.") from None


def _within(root: Path, path: Path, given: str) -> str:
    """Return the path relative to the folder. The path itself may be a link."""
    found = os.path.normpath(path)
    if not os.path.lexists(found):
        raise UsageError(f"ship: there is no {given} in {root}.")
    if not Path(found).parent.resolve().is_relative_to(root) and Path(found).resolve() != root:
        raise UsageError(f"ship: {given} is not in {root}, the working directory: name paths within it.")
    return os.path.relpath(Path(found).parent.resolve() / Path(found).name, root)


def _names(root: Path, wanted: Sequence[str]) -> Iterator[str]:
    """Yield the relative paths of files and links in the folder; if `wanted` is not empty, only those in `wanted`."""
    found = _known_to_git(root)
    names = _walked(root) if found is None else found
    for name in names:
        if not wanted or any(each == "." or name == each or name.startswith(f"{each}/") for each in wanted):
            yield name
    for each in wanted:  # a file that was named is packed even if git ignores it
        if not (root / each).is_dir():
            yield each


def _known_to_git(root: Path) -> list[str] | None:
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError:  # there is no git
        return None
    names = [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    # git also lists deleted files, and a submodule as one folder.
    return [name for name in names if os.path.lexists(root / name)] if done.returncode == 0 and names else None


def _walked(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        folders[:] = sorted(name for name in folders if name not in JUNK and name not in links)
        for name in (*files, *links):
            if name not in JUNK and not name.endswith(".pyc"):
                yield os.path.relpath(os.path.join(folder, name), root)


def _is_excluded(name: str, patterns: Sequence[str]) -> bool:
    parts = name.split("/")
    paths = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    return any(fnmatch.fnmatch(each, pattern.rstrip("/")) for pattern in patterns for each in (*parts, *paths))


def _check(root: Path, names: Sequence[str]) -> None:
    sizes: dict[str, int] = {}
    for name in names:
        path = root / name
        if path.is_symlink() and not _leads_to(path).is_relative_to(root):
            raise UsageError(
                f"ship: {name} is a link to {os.readlink(path)}, out of {root}: leave it out with "
                f"exclude=[{name!r}], or put what it leads to into the folder."
            )
        sizes[name] = 0 if path.is_symlink() or not path.is_file() else path.stat().st_size
    if not names:
        raise UsageError(f"ship: there is nothing to be packed in {root}.")
    if (total := sum(sizes.values())) > (limit := limit_bytes()):
        largest = sorted(sizes, key=lambda name: -sizes[name])[:MAX_NAMED]
        raise UsageError(
            f"ship: {root} has {_mib(total)} in {len(names)} files, and {LIMIT_VARIABLE} allows {_mib(limit)}. The "
            f"largest are {listed(f'{name} ({_mib(sizes[name])})' for name in largest)}: use exclude=[…] or "
            ".gitignore to leave out what workers do not need, and put data where workers can read it."
        )


def _leads_to(link: Path) -> Path:
    try:
        link.stat()  # which fails on every Python: `resolve` does not from 3.13 on
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UsageError(f"ship: {link} is a link to itself: remove it.") from None
    return link.resolve()


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"


def _write(root: Path, names: Sequence[str], file: BufferedRandom) -> str:
    with (
        gzip.GzipFile("", "wb", compresslevel=1, fileobj=file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in names:
            if not (root / name).is_symlink() and not (root / name).is_file():
                continue  # a pipe, a socket or a submodule
            info = archive.gettarinfo(str(root / name), arcname=name)
            info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
            info.mode = 0o755 if info.mode & 0o100 else 0o644
            if info.issym():  # make it relative, so that it is right wherever the archive is unpacked
                info.linkname = os.path.relpath((root / name).resolve(), (root / name).parent.resolve())
                archive.addfile(info)
                continue
            info.type, info.linkname = tarfile.REGTYPE, ""  # hard links become files of their own
            with (root / name).open("rb") as source:
                info.size = os.fstat(source.fileno()).st_size
                try:
                    archive.addfile(info, source)
                except OSError as error:
                    if error.errno is not None:  # of the archive itself
                        raise
                    raise UsageError(f"ship: {root / name} became shorter while it was packed: submit again.") from None
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive into a new folder, and make it read-only.

    Raises:
        UsageError: an entry is a device or leads out of the folder; nothing is left.
        OSError: the file system is full, or may not be written; nothing is left.
    """
    if not hasattr(tarfile, "data_filter"):
        version = ".".join(map(str, sys.version_info[:3]))
        raise UsageError(f"the job's code is unpacked safely by Python 3.11.4 and later alone; this is {version}.")
    folder.mkdir(mode=0o700)
    try:
        with tarfile.open(archive, mode="r:gz") as packed:
            packed.extractall(folder, filter="data")
        make_content_read_only(folder)
        folder.chmod(0o555)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, OSError) as error:
        remove_folder(folder)
        if isinstance(error, OSError) and error.errno is not None and error.errno != errno.EINVAL:
            raise
        raise UsageError(f"the archive of the job's code is refused: {error}.") from None


def make_content_read_only(folder: Path) -> None:
    """Remove all rights to write what is in a folder; the folder itself stays as it is."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if not path.is_symlink():
            path.chmod(0o555 if path.is_dir() or path.stat().st_mode & 0o100 else 0o444)
