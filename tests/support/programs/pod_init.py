"""First process of a pod that the tests play: makes the container's file system, gives up root, becomes its command.

pod_init.py FILE.json      in namespaces of its own (mount, uts, ipc, pid, net), as root

The image is this machine's programs and this tree, at their own places, for reading alone. What a runtime does besides
and this does not: seccomp, control groups, user namespaces.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def bind(source: str, target: Path, *, is_writable: bool = False) -> None:
    """Bind a file or folder to a place, which is made."""
    if os.path.isdir(source):
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    mount("--rbind", source, str(target))
    if not is_writable:
        mount("-o", "remount,bind,ro", str(target))


def image(root: Path) -> None:
    for name in ("bin", "sbin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            (root / name).symlink_to(os.readlink(f"/{name}"))
        elif os.path.isdir(f"/{name}"):
            bind(f"/{name}", root / name)
    bind("/usr", root / "usr")
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    etc = root / "etc"
    etc.mkdir()
    (etc / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")  # not the pod's user, as in most images
    (etc / "group").write_text("root:x:0:\n")
    (etc / "nsswitch.conf").write_text("hosts: files dns\n")
    (etc / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")  # refuses at once
    for name in ("ld.so.cache", "ld.so.conf"):
        if os.path.exists(f"/etc/{name}"):
            shutil.copy(f"/etc/{name}", etc / name)


def devices(root: Path) -> None:
    for name in ("null", "zero", "full", "random", "urandom"):
        bind(f"/dev/{name}", root / "dev" / name, is_writable=True)
    (root / "dev/fd").symlink_to("/proc/self/fd")
    (root / "dev/shm").mkdir()
    (root / "proc").mkdir()
    mount("-t", "proc", "proc", str(root / "proc"))
    bind("/sys", root / "sys")


def volumes(root: Path, found: list[dict[str, Any]]) -> None:
    for volume in found:
        target = root / volume["path"].lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        if volume["size"]:  # emptyDir of medium Memory
            mount("-t", "tmpfs", "-o", f"size={volume['size']},mode=1777", "tmpfs", str(target))
        else:
            bind(volume["source"], target, is_writable=not volume["read_only"])


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    root = Path(given["root"])
    mount("--make-rprivate", "/")
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(root))
    image(root)
    bind(given["workspace"], root / "workspace")
    devices(root)
    bind(given["hosts"], root / "etc/hosts")
    volumes(root, given["volumes"])
    for folder in given["image"]:  # last: a checkout may lie below a volume, such as /tmp
        bind(folder, root / folder.lstrip("/"))
    if given["read_only"]:
        mount("-o", "remount,ro", str(root))
    socket.sethostname(given["hostname"])
    os.chroot(root)
    os.chdir("/workspace")
    uid, gid, group = given["uid"], given["gid"], given["group"]
    drop = ["setpriv", f"--reuid={uid}", f"--regid={gid}", f"--groups={group}", "--inh-caps=-all"]
    drop += ["--bounding-set=-all", "--no-new-privs", "--pdeathsig=KILL", "--"]
    os.execvpe(drop[0], [*drop, *given["command"]], given["env"])


if __name__ == "__main__":
    main()
