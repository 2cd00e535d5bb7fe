"""Guess, from the text of a job's programs, what the zygotes of its embedded cluster import before they fork.

DDP and optimizers import `torch._dynamo`, which takes more than a second: once in the zygote, or in each rank. A script
that uses the standard library alone need not wait for torch.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path
from typing import Literal

from unified.job.spec import EntryPoint, JobSpec

Preload = Literal["", "all", "torch", "none"]
_TRAINS = re.compile(r"optim|DistributedDataParallel|\bDDP\b|fully_shard|FSDP|torch\.compile|Trainer")
_OURS = re.compile(r"unified|omegaconf|dlrover|dtruntime")
_STARTS = re.compile(
    r"\b(ctypes|eval|exec|importlib|multiprocessing|popen|posix_spawn|pty|runpy|spawn|subprocess|system)|__import__"
)
"""Names by which a script may start something that needs torch."""


def guess(spec: JobSpec) -> Preload:
    """Return what a job needs: all of torch's imports, torch without our modules, none, or the usual ones (empty)."""
    texts = [(role, _text(spec, role.entry_point)) for role in spec.roles]
    if any(role.total > 1 and guess_of(text) for role, text in texts):
        return "all"
    if any(role.entry_point.kind != "script" or not text or _OURS.search(text) for role, text in texts):
        return ""
    return "none" if all(_is_of_the_library(text) for _, text in texts) else "torch"


def own_modules(spec: JobSpec) -> list[str]:
    """Return the job's preload if zygotes with the interpreter and environment of its cluster can import it."""
    has_own = any(not name.startswith("UNIFIED_") for role in spec.roles for name in role.envs)
    return [] if has_own or spec.python or spec.requirements or spec.start_method == "spawn" else spec.preload


def guess_of(text: str) -> Preload:
    """Guess for a job of which only the text of its file is known."""
    return "all" if _TRAINS.search(text) else ""


def _text(spec: JobSpec, entry: EntryPoint) -> str:
    if entry.kind == "value":
        return bytes(entry.code.data).decode("latin-1")  # names are plain text in the pickled bytes
    here = [] if spec.working_dir is None else [spec.working_dir]
    if entry.kind == "script":
        files = [Path(*here, entry.target)]
    else:
        files = [Path(folder, f"{entry.target.replace('.', '/')}.py") for folder in (*spec.sys_path, *here)]
    return next((file.read_text(errors="replace") for file in files if os.access(file, os.R_OK) and file.is_file()), "")


def _is_of_the_library(text: str) -> bool:
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):
        return False
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {"." * node.level + (node.module or "") for node in nodes if isinstance(node, ast.ImportFrom)}
    is_known = {name.partition(".")[0] for name in names} <= sys.stdlib_module_names
    return is_known and not _STARTS.search(text)
