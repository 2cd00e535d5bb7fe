"""Archives of code: which files of a folder are packed, and what is not unpacked."""

import io
import os
import stat
import subprocess
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from unified.client.code.archive import CodeArchive, pack, real_path, unpack
from unified.config.settings import remove_folder
from unified.errors import UsageError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    files = ("train.py", "lib/net.py", "lib/deep/x.txt", "data/big.bin", ".venv/pip", "__pycache__/train.pyc")
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"this is {name}")
    (folder / "run.sh").write_text("#!/bin/sh")
    (folder / "run.sh").chmod(0o700)
    (folder / "link").symlink_to("lib/net.py")
    return folder


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x", *words], check=True)


def unpacked(archive: CodeArchive, tmp_path: Path) -> Path:
    file, folder = tmp_path / "archive", tmp_path / "unpacked"
    if folder.exists():
        remove_folder(folder)
    file.write_bytes(archive.read(0))
    unpack(file, folder)
    return folder


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or path.is_file()}


def test_a_folder_without_git_is_packed_without_junk(tree: Path, tmp_path: Path) -> None:
    with pack(True, folder=str(tree)) as archive:
        folder = unpacked(archive, tmp_path)
        assert archive.code.root == str(tree)
        assert archive.num_files == len(names(folder))
    assert names(folder) == {"train.py", "lib/net.py", "lib/deep/x.txt", "data/big.bin", "run.sh", "link"}
    assert (folder / "lib/net.py").read_text() == "this is lib/net.py"
    assert os.readlink(folder / "link") == "lib/net.py"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "train.py", folder / "run.sh")}
    assert modes == {"unpacked": 0o555, "train.py": 0o444, "run.sh": 0o555}


def test_git_says_what_is_packed(tree: Path, tmp_path: Path) -> None:
    (tree / ".gitignore").write_text("data/\n.venv/\n__pycache__/\n")
    git(tree, "init", "-q")
    git(tree, "add", "train.py", "lib/net.py", "run.sh")
    git(tree, "commit", "-qm", "x")
    (tree / "run.sh").unlink()
    with pack(True, folder=str(tree)) as archive:
        packed = names(unpacked(archive, tmp_path))
    assert packed == {".gitignore", "train.py", "lib/net.py", "lib/deep/x.txt", "link"}
    with pack("lib", folder=str(tree)) as archive:
        assert archive.code.root == str(tree / "lib")
        assert names(unpacked(archive, tmp_path)) == {"net.py", "deep/x.txt"}
    with pack(["lib", "data/big.bin"], folder=str(tree)) as archive:
        assert names(unpacked(archive, tmp_path)) == {"lib/net.py", "lib/deep/x.txt", "data/big.bin"}


@pytest.mark.parametrize("has_git", [False, True])
def test_files_of_secrets_are_left_out_unless_they_are_named(tree: Path, tmp_path: Path, has_git: bool) -> None:
    for name in (".env", "lib/.env.local", ".netrc", "env.py"):
        (tree / name).write_text("TOKEN=x")
    if has_git:
        git(tree, "init", "-q")
        git(tree, "add", ".env", "env.py", "lib")
    with pack(True, folder=str(tree)) as archive:
        packed = names(unpacked(archive, tmp_path))
        assert archive.left_out == [".env", ".netrc", "lib/.env.local"]
        assert archive.num_files == len(packed)
    assert {"env.py", "train.py"} <= packed
    assert not packed.intersection(archive.left_out)
    with pack([".", "lib/.env.local"], folder=str(tree)) as archive:
        assert "lib/.env.local" in names(unpacked(archive, tmp_path))
        assert archive.left_out == [".env", ".netrc"]


@pytest.mark.parametrize(
    ("pattern", "gone"),
    [
        ("*.py", {"train.py", "lib/net.py"}),
        ("data", {"data/big.bin"}),
        ("lib/deep/", {"lib/deep/x.txt"}),
        ("l*/n*", {"lib/net.py"}),
    ],
)
def test_patterns_leave_files_and_folders_out(tree: Path, tmp_path: Path, pattern: str, gone: set[str]) -> None:
    with pack(True, ["link", pattern], str(tree)) as archive:
        packed = names(unpacked(archive, tmp_path))
    assert packed == {"train.py", "lib/net.py", "lib/deep/x.txt", "data/big.bin", "run.sh"} - gone


def test_the_same_files_give_the_same_bytes(tree: Path) -> None:
    with pack(True, folder=str(tree)) as first:
        for path in tree.rglob("*"):
            os.utime(path, (1, 1), follow_symlinks=False)
        with pack(True, folder=str(tree)) as second:
            assert first.code == second.code
        (tree / "train.py").write_text("this is another")
        with pack(True, folder=str(tree)) as third:
            assert first.code.digest != third.code.digest


def test_too_much_names_the_largest(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "data/big.bin").write_bytes(bytes(3 << 20))
    monkeypatch.setenv("UNIFIED_SHIP_LIMIT", "2")
    with pytest.raises(UsageError, match=r"has 3.0 MiB in 6 files, and UNIFIED_SHIP_LIMIT allows 2.0 MiB. The largest"):
        pack(True, folder=str(tree))
    with pytest.raises(UsageError, match=r"data/big.bin \(3.0 MiB\)"):
        pack(True, folder=str(tree))
    pack(True, ["data"], str(tree)).__exit__(None, None, None)
    monkeypatch.setenv("UNIFIED_SHIP_LIMIT", "much")
    with pytest.raises(UsageError, match="UNIFIED_SHIP_LIMIT='much' is not a number"):
        pack(True, folder=str(tree))


@pytest.mark.parametrize(
    ("ship", "error"),
    [
        ("nowhere", "there is no folder"),
        (["no.py"], "there is no no.py"),
        (["../out.py"], "is not in"),
        ([], "nothing"),
    ],
)
def test_what_cannot_be_packed(tree: Path, ship: str | list[str], error: str) -> None:
    (tree.parent / "out.py").touch()
    exclude = ["*"] if ship == [] else []
    with pytest.raises(UsageError, match=error):
        pack(ship, exclude, str(tree))


def test_a_link_out_of_the_folder_is_refused(tree: Path) -> None:
    (tree / "away").symlink_to("/etc/passwd")
    with pytest.raises(UsageError, match=r"away is a link to /etc/passwd, out of .*: leave it out with exclude="):
        pack(True, folder=str(tree))
    pack(True, ["away"], str(tree)).__exit__(None, None, None)


def test_links_within_the_folder_lead_there_on_a_node_too(tree: Path, tmp_path: Path) -> None:
    (tree / "absolute").symlink_to(tree / "lib/net.py")
    (tree / "lib/roundabout").symlink_to("../../tree/train.py")
    with pack(True, folder=str(tree)) as archive:
        folder = unpacked(archive, tmp_path)
    assert (os.readlink(folder / "absolute"), os.readlink(folder / "lib/roundabout")) == ("lib/net.py", "../train.py")
    (tree / "itself").symlink_to("itself")
    with pytest.raises(UsageError, match="itself is a link to itself"):
        pack(True, folder=str(tree))


def test_paths_that_lead_into_the_folder_by_links_are_told_without(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tree)
    root = str(tree)
    assert real_path(str(tmp_path / "link/train.py"), root) == str(tree / "train.py")
    assert real_path(root, root) == root
    for other in ("train.py", "/usr", f"{root}-other/x"):
        assert real_path(other, root) == other


def hostile(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        good = tarfile.TarInfo("good.py")
        archive.addfile(good)
        bad = tarfile.TarInfo(name)
        bad.type, bad.linkname = kind, target
        archive.addfile(bad)
    return file.getvalue()


@pytest.mark.parametrize(
    "archive",
    [
        hostile("../out"),
        hostile("a/../../out"),
        hostile("link", tarfile.SYMTYPE, "../out"),
        hostile("link", tarfile.SYMTYPE, "/etc/passwd"),
        hostile("hard", tarfile.LNKTYPE, "../../etc/passwd"),
        hostile("device", tarfile.CHRTYPE),
        hostile("block", tarfile.BLKTYPE),
        hostile("pipe", tarfile.FIFOTYPE),
        hostile("good.py")[:-40],
        b"this is no archive",
    ],
    ids=["dots", "dots within", "link", "absolute link", "hard link", "device", "block device", "pipe", "cut", "text"],
)
def test_what_leads_out_or_is_no_file_is_refused_and_leaves_nothing(archive: bytes, tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(archive)
    with pytest.raises(UsageError, match="the archive of the job's code is refused"):
        unpack(tmp_path / "archive", tmp_path / "folder")
    assert {path.name for path in tmp_path.iterdir()} == {"archive"}


def test_an_absolute_path_stays_within(tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(hostile("/absolute.py"))
    unpack(tmp_path / "archive", tmp_path / "folder")
    assert names(tmp_path / "folder") == {"good.py", "absolute.py"}


def test_a_file_that_becomes_shorter_while_it_is_packed_is_named(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fstat = os.fstat

    def grown(descriptor: int) -> SimpleNamespace:  # the size of before, so that less is read
        return SimpleNamespace(st_size=fstat(descriptor).st_size + 5)

    with monkeypatch.context() as patch:
        patch.setattr("unified.client.code.archive.os.fstat", grown)
        with pytest.raises(UsageError, match=rf"{tree}/\S+ became shorter while it was packed"):
            pack(True, folder=str(tree))
