"""Conversion of a worker's record of a role back to the description that the user wrote."""

from __future__ import annotations

import shlex
from typing import Any

from msgspec.structs import asdict

from unified.job.entrypoint import NO_PYTHON
from unified.job.payload import decode
from unified.job.spec import EntryPoint, RoleSpec
from unified.job.to_spec import same_fields
from unified.job.workloads import (
    CustomWorkloadDesc,
    ElasticWorkloadDesc,
    EngineDesc,
    NodeGroupFailoverDesc,
    ResourceDesc,
    SimpleWorkloadDesc,
    WorkloadDesc,
)

_KINDS: dict[str, type[WorkloadDesc]] = {
    "elastic": ElasticWorkloadDesc,
    "simple": SimpleWorkloadDesc,
    "custom": CustomWorkloadDesc,
}


def workload_of(role: RoleSpec) -> WorkloadDesc:
    """Return the description of a role. Its `envs` include the job's, and its `config` is decoded.

    Nothing is checked again: the role was accepted once, maybe by a newer release.
    """
    kind = _KINDS[role.kind]
    fields: dict[str, Any] = {
        **{field: getattr(role, field) for field in same_fields(kind)},
        "resource": _resource(role),
        "envs": dict(role.envs),
        "group": role.collocation,
        "entry_point": _entry_point(role.entry_point),
        "config": decode(role.config, f"config of role {role.name}") or {},
        "node_group_failover": NodeGroupFailoverDesc.model_construct(
            enabled=role.failover_label is not None,
            group_label_key=role.failover_label or "",
            timeout=role.failover_timeout_s,
        ),
        "hang_timeout": role.hang_timeout_s,
    }
    if role.kind == "elastic":
        fields |= {
            "comm_pre_check": role.communication.pre_check,
            "comm_auto_setup_process_group": role.communication.auto_setup,
            "comm_backend": role.communication.backend,
            "comm_timeout_s": role.communication.timeout_s,
        }
    elif role.engine is not None:
        fields["engine"] = EngineDesc.model_construct(**asdict(role.engine))
    elif role.kind == "custom":
        fields |= {"module_name": role.entry_point.target, "class_name": role.entry_point.attribute}
    return kind.model_construct(**fields)


def _resource(role: RoleSpec) -> ResourceDesc:
    amounts = role.resources
    share = amounts.accelerator
    return ResourceDesc.model_construct(
        cpu=amounts.cpu,
        memory=int(amounts.memory_mb),
        disk=int(amounts.disk_mb),
        accelerator=round(share, 2) if role.collocation and share < 1 else share,  # as collocations write it
        user_defined=dict(amounts.user_defined),
    )


def _entry_point(entry: EntryPoint) -> str:
    if entry.kind in ("attribute", "value"):
        return f"{entry.target}.{entry.attribute}"
    flag = {"module": ["-m"], "program": [NO_PYTHON]}
    return shlex.join([*flag.get(entry.kind, []), entry.target, *entry.argv])
