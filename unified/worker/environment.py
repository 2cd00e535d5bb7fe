"""The environment of a worker: variables, working directory, module path, and the variables of its round.

The agent decides what depends on the node (visible devices, network interface, threads) and sends it in `Launch.env`.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from types import MappingProxyType

from msgspec import structs

from unified import error_file
from unified.config.settings import python_path
from unified.errors import EntryPointError
from unified.job.driver import WORKING_DIR, user
from unified.job.names import with_ports
from unified.job.spec import EntryPoint, RoleSpec, WorkerPlace
from unified.protocol.agent_master import RunOrder
from unified.protocol.worker_agent import Launch
from unified.worker.fork_setup import enter

_PROGRAMS = ("script", "module", "program")
_DEVICE = "ACCELERATE_TORCH_DEVICE"
_SHORT_NAMES = ("JOB", "NAME", "ROLE")


def apply(launch: Launch) -> None:
    """Apply a launch to this process: variables, directory, module path."""
    environ = os.environ
    given = variables(launch, environ)
    environ.update(given)
    if "TZ" in given:
        time.tzset()
    directory = None
    try:
        directory = working_directory(launch, environ)
        if directory is not None:
            enter(directory)
    except OSError as error:
        raise EntryPointError(
            f"node {launch.node}: the worker runs as {user()}, which cannot enter {error.filename} ({error.strerror}): "
            "submit with ship=True (--ship), or from a folder that this user can read."
        ) from None
    environ.update(python_path(environ, os.getcwd()))
    for name in {"COLUMNS", "LINES"} - environ.keys():  # set, unseen by Python, by readline, which pdb imports
        os.unsetenv(name)
    sys.path[:0] = new_path_entries(launch, directory, sys.path, environ)
    sys.path += last_path_entries(launch, sys.path)
    importlib.invalidate_caches()  # the zygote may have looked into these directories before the user wrote there


def variables(launch: Launch, inherited: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Return all variables of a launch: the node's, those that the user set for the role, and the worker's identity.

    Later ones win: the user can set anything except the identity. A script is written for any launcher, so it keeps a
    `NAME`, `ROLE` or `JOB` of its own.
    """
    if launch.kind == "store":
        return dict(launch.env)
    role = launch.spec.role(launch.role)
    who = identity(launch)
    if role.entry_point.kind in _PROGRAMS:
        users = {**inherited, **role.envs}
        who = {name: value for name, value in who.items() if name not in _SHORT_NAMES or name not in users}
    envs = {name: with_ports(value, launch.ports) for name, value in role.envs.items()}
    return {**launch.env, **envs, **who}


def entry_point(launch: Launch) -> EntryPoint:
    """Return the code that the worker runs, with the numbers of its ports in the arguments."""
    entry = launch.spec.role(launch.role).entry_point
    return structs.replace(entry, argv=[with_ports(word, launch.ports) for word in entry.argv])


def identity(launch: Launch) -> dict[str, str]:
    """Return the variables that say who a worker is."""
    return {
        "JOB": launch.spec.name,
        "NAME": launch.name,
        "ROLE": launch.role,
        **_ranks(launch.place),
        "UNIFIED_JOB_ID": launch.job_id,
        "UNIFIED_NODE": launch.node,
        "UNIFIED_INCARNATION": str(launch.incarnation),
        **({"UNIFIED_MASTER": launch.master} if launch.master else {}),
    }


def elastic(launch: Launch, role: RoleSpec, order: RunOrder, store_port: int) -> dict[str, str]:
    """Return the variables of a rank in a round, under torchrun's names."""
    return {
        **_ranks(structs.replace(launch.place, rank=order.rank, world_size=order.world_size)),
        "ROLE_RANK": str(order.rank),
        "ROLE_WORLD_SIZE": str(order.world_size),
        "ROLE_NAME": role.name,
        "GROUP_RANK": str(order.node_rank),
        "NODE_RANK": str(order.node_rank),
        "GROUP_WORLD_SIZE": str(max(1, order.world_size // launch.place.local_world_size)),
        "MASTER_ADDR": order.store_host,
        "MASTER_PORT": str(store_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # every rank is a client: the store is not in rank 0
        "TORCHELASTIC_RESTART_COUNT": str(launch.incarnation),
        "TORCHELASTIC_MAX_RESTARTS": str(role.max_restart if role.role_max_restart is None else role.role_max_restart),
        "TORCHELASTIC_RUN_ID": role.communication.run_id or launch.job_id,
        "TORCHELASTIC_ERROR_FILE": error_file.beside(launch.log_file),  # where torch's @record writes what broke
    }


def _ranks(place: WorkerPlace) -> dict[str, str]:
    return {field.upper(): str(value) for field, value in structs.asdict(place).items()}


def take_device(launch: Launch, environ: MutableMapping[str, str]) -> str:
    """Return the worker's first device as torch names it. Its number counts the devices that the agent made visible.

    A program as `torchrun` runs it loses the agent's variable: accelerate would prefer it to ``cpu=True``, and make no
    device the current one.
    """
    role = launch.spec.role(launch.role)
    found = environ.get(_DEVICE) or "cpu"
    if role.entry_point.kind in _PROGRAMS and not role.communication.auto_setup and _DEVICE not in role.envs:
        environ.pop(_DEVICE, None)
    return found


def with_shipped_code(launch: Launch) -> Launch:
    """Return the launch with the submitter's paths into the shipped code replaced by paths of this node. A working
    directory outside that code is replaced by the code's folder."""
    code = launch.spec.code
    if code is None:
        return launch

    def here(path: str) -> str:
        is_inside = path == code.root or path.startswith(f"{code.root.rstrip('/')}/")
        return os.path.normpath(os.path.join(launch.code_dir, os.path.relpath(path, code.root))) if is_inside else path

    roles = []
    for role in launch.spec.roles:
        entry = role.entry_point
        target = here(entry.target) if entry.kind in ("script", "program") else entry.target
        envs = {name: here(value) if name == WORKING_DIR else value for name, value in role.envs.items()}
        if path := envs.get("PYTHONPATH"):
            envs["PYTHONPATH"] = os.pathsep.join(here(entry) for entry in path.split(os.pathsep))
        roles.append(structs.replace(role, entry_point=structs.replace(entry, target=target), envs=envs))
    found = here(launch.spec.working_dir or "")
    spec = structs.replace(
        launch.spec,
        roles=roles,
        working_dir=found if found != launch.spec.working_dir else launch.code_dir,
        sys_path=list(dict.fromkeys([here(path) for path in launch.spec.sys_path] + [launch.code_dir])),
    )
    return structs.replace(launch, spec=spec)


def working_directory(launch: Launch, environ: Mapping[str, str]) -> Path | None:
    """The directory to work in: ``DLROVER_WORKING_DIR``, else the job's `working_dir`; None: the present one."""
    given = environ.get(WORKING_DIR) or launch.spec.working_dir
    if not given:
        return None
    directory = Path(given)
    if not directory.is_dir():
        raise EntryPointError(
            f"node {launch.node} has no working directory {given}: make it there, or name one that every node has with "
            "working_dir= (it is the folder that the job was submitted from if nothing else is said)."
        )
    return directory


def new_path_entries(
    launch: Launch, directory: Path | None, path: Sequence[str], environ: Mapping[str, str]
) -> list[str]:
    """Return what goes in front of `sys.path`: the driver's path, the working directory, and the job's own PYTHONPATH.

    A script gets neither of the first two, which could hide a library, except a working directory that
    ``DLROVER_WORKING_DIR`` chose. It finds its own folder there, as in plain Python.

    The driver's path begins with its script's folder, as in plain Python: a module in the working directory must not
    hide one beside the script. A working directory still comes first if ``DLROVER_WORKING_DIR`` chose it, or if it is
    not in the driver's path.

    A forked worker's interpreter was started before its environment was known, so PYTHONPATH is read here.
    """
    role = launch.spec.role(launch.role)
    is_chosen = directory is not None and directory == Path(environ.get(WORKING_DIR, ""))
    driver = _driver_path(launch)
    if role.entry_point.kind == "script":
        driver = [str(directory)] if is_chosen else []
    elif directory is not None and str(directory) not in driver:
        driver.insert(0, str(directory))
    elif is_chosen:
        driver.sort(key=lambda entry: entry != str(directory))
    front = list(dict.fromkeys(driver))
    own = python_path(role.envs, directory or os.getcwd()).get("PYTHONPATH", "").split(os.pathsep)
    return front + [entry for entry in dict.fromkeys(own) if entry and entry not in (*front, *path)]


def last_path_entries(launch: Launch, path: Sequence[str]) -> list[str]:
    """Return what goes behind `sys.path`: for a script the driver's path, for classes of the driver's values."""
    if launch.spec.role(launch.role).entry_point.kind != "script":
        return []
    return [entry for entry in dict.fromkeys(_driver_path(launch)) if entry not in path]


def _driver_path(launch: Launch) -> list[str]:
    return [entry for entry in launch.spec.sys_path if Path(entry).exists()]


def thread_count(environ: Mapping[str, str]) -> int:
    """Number of threads that a computation of this worker may use: ``OMP_NUM_THREADS``, else all cores."""
    first = environ.get("OMP_NUM_THREADS", "").split(",")[0]  # OpenMP allows one number for each level of nesting
    return int(first) if first.isdigit() and int(first) > 0 else len(os.sched_getaffinity(0))
