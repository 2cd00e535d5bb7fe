"""The job of an everyday ``unified run``, put together without the job description's models.

Loading those takes longer than all else that happens before the master hears of the job. A test compares every job made
here with the one that the models make; whatever is out of the ordinary is left to them.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Literal

from unified.config.settings import Intervals
from unified.job.driver import WORKING_DIR, Driver
from unified.job.names import check_job_name
from unified.job.spec import Blob, Communication, EntryPoint, JobSpec, Resources, RoleSpec

_USED = {
    *("nnodes", "nproc_per_node", "max_restarts", "role", "module", "run_path", "standalone"),
    *("training_script", "training_script_args"),
}
_NOT_OPTIONS = {
    *(f"UNIFIED_{field.upper()}" for field in Intervals.__struct_fields__),
    *("UNIFIED_MASTER", "UNIFIED_HOME", "UNIFIED_RUN_DIR", "UNIFIED_PROGRESS", "UNIFIED_CLUSTER_ID"),
    *("UNIFIED_KEY_FILE", "UNIFIED_INSECURE"),
}
_NO_CONFIG = Blob(codec="msgpack", data=b"\x80")
_ROLE = "ELASTIC"


def quick_spec(
    parsed: Namespace,
    parser: ArgumentParser,
    name: str,
    driver: Driver,
    env: Mapping[str, str],
) -> JobSpec | None:
    """The job, or None if the command line or the environment says anything out of the ordinary.

    Raises:
        JobNameError: as with the models.
    """
    if env.get(WORKING_DIR) or any(_may_be_option(variable) for variable, value in env.items() if value):
        return None
    is_plain = all(value == parser.get_default(key) for key, value in vars(parsed).items() if key not in _USED)
    entry = _entry_point(parsed)
    lowest, _, highest = parsed.nnodes.partition(":")
    num_nodes, per_node = _number(lowest), _number(parsed.nproc_per_node)
    is_plain = is_plain and parsed.role == "default" and highest in ("", lowest) and parsed.max_restarts >= 0
    if not (is_plain and entry and num_nodes and per_node):
        return None
    return JobSpec(
        name=check_job_name(name),
        roles=[_role(entry, num_nodes * per_node, per_node, parsed.max_restarts, driver.env)],
        node_num=num_nodes,
        device_per_node=per_node * num_nodes,
        failover_exec=2,
        user_config=_NO_CONFIG,
        working_dir=driver.working_dir,
        sys_path=driver.sys_path,
        submitted_by=driver.submitted_by,
    )


def _role(entry: EntryPoint, total: int, per_node: int, max_restarts: int, env: Mapping[str, str]) -> RoleSpec:
    return RoleSpec(
        name=_ROLE,
        kind="elastic",
        entry_point=entry,
        total=total,
        per_group=per_node,
        resources=Resources(accelerator=1.0),
        envs=dict(env),
        config=_NO_CONFIG,
        max_restart=max_restarts,
        role_max_restart=max_restarts,
        communication=Communication(pre_check=False, auto_setup=False),  # the script calls init_process_group itself
    )


def _may_be_option(variable: str) -> bool:
    return variable.startswith(("UNIFIED_", "DLROVER_UNIFIED_")) and variable not in _NOT_OPTIONS


def _number(text: str) -> int:
    """A plain number above 0; 0 for anything else."""
    return int(text) if text.isdecimal() else 0


def _entry_point(parsed: Namespace) -> EntryPoint | None:
    if not parsed.module and not parsed.training_script.endswith(".py"):
        return None
    kind: Literal["module", "script"] = "module" if parsed.module else "script"
    return EntryPoint(kind=kind, target=parsed.training_script, argv=parsed.training_script_args)
