"""Faults of a job that came over the wire, for which the master refuses it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from unified.errors import JobNameError
from unified.job.names import check_job_name
from unified.job.spec import JobSpec, RoleSpec, has_range

MAX_WORKERS = 100_000
MAX_SPEC_BYTES = 8 * 2**20
MAX_LABEL_CHARS = 8192
"""Most characters of a job's labels: each list of jobs has them."""


def faults_of(spec: JobSpec) -> Iterator[str]:
    """Yield the faults of a job that came over the wire; the builder checks more, with better messages."""
    try:
        check_job_name(spec.name)
    except JobNameError as error:
        yield str(error)
    names = [role.name for role in spec.roles]
    if not names:
        yield f"job {spec.name} has no role."
    if len(set(names)) != len(names):
        yield f"job {spec.name} has two roles with the same name."
    if spec.node_num < 1:
        yield f"job {spec.name}: node_num must be at least 1."
    if not all(math.isfinite(amount) and amount >= 0 for amount in (spec.master_cpu, spec.master_memory_mb)):
        yield f"job {spec.name}: master_cpu and master_memory_mb must be numbers from 0 upwards."
    if spec.device_per_node < 1:
        yield f"job {spec.name}: device_per_node must be at least 1."
    for name in ("stop_grace_s", "save_grace_s", "restart_window_s", "restart_backoff_s"):
        if not math.isfinite(seconds := getattr(spec, name)) or seconds < 0:
            yield f"job {spec.name}: {name} must be 0 or more seconds."
    if sum(max(0, role.total) for role in spec.roles) > MAX_WORKERS:
        yield f"job {spec.name} has more than {MAX_WORKERS} workers."
        return
    if sum(len(name) + len(value) for name, value in spec.labels.items()) > MAX_LABEL_CHARS:
        yield f"job {spec.name} has more than {MAX_LABEL_CHARS} characters of labels; annotations may be longer."
    yield from _weight_faults(spec)
    counts: dict[str, int] = {}
    for role in spec.roles:
        yield from _role_faults(role)
        count = role.total // max(1, role.per_group)
        if role.collocation and counts.setdefault(role.collocation, count) != count:
            yield f"role {role.name}: collocated roles must have the same number of groups."


def _weight_faults(spec: JobSpec) -> Iterator[str]:
    """Yield the fault of a job that is too large: each node and worker gets all of it, beside heartbeats."""
    if (total := len(msgspec.msgpack.encode(spec))) <= MAX_SPEC_BYTES:
        return
    parts = {"the job's config": len(spec.user_config.data)}
    for role in spec.roles:
        parts[f"the config of role {role.name}"] = len(role.config.data)
        parts[f"the environment of role {role.name}"] = sum(len(key) + len(value) for key, value in role.envs.items())
    heaviest = max(parts, key=lambda name: parts[name])
    yield (
        f"job {spec.name} has {total / 2**20:.1f} MiB of description, at most {MAX_SPEC_BYTES / 2**20:g} are allowed; "
        f"{heaviest} has {parts[heaviest] / 2**20:.1f} of them. Put large data into a file, and its path into the job."
    )


def _role_faults(role: RoleSpec) -> Iterator[str]:
    if not role.name or len(role.name) > 63 or not all(letter.isalnum() or letter in "._-" for letter in role.name):
        yield f"role name {role.name[:64]!r} is not allowed: at most 63 letters, digits and ._- only."
    if role.name.startswith("."):
        yield f"role name {role.name!r} must not begin with a dot."
    if role.total < 0 or role.per_group < 1:
        yield f"role {role.name}: total must be at least 0 and per_group at least 1."
    elif role.total % role.per_group:
        yield f"role {role.name}: total={role.total} cannot be cut into groups of {role.per_group}."
    is_of_range = role.kind == "elastic" and not role.collocation and role.num_groups == role.max_nodes
    if has_range(role) and not is_of_range:
        yield (
            f"role {role.name}: only an elastic role without collocation may have a range of nodes, and its total must "
            "be that of the most nodes."
        )
    if role.restart_alone and role.kind == "elastic":
        yield f"role {role.name}: the ranks of an elastic role restart together, so restart_alone is not for it."
    needs = role.resources
    amounts = [needs.cpu, needs.memory_mb, needs.disk_mb, needs.accelerator, *needs.user_defined.values()]
    if not all(math.isfinite(amount) and amount >= 0 for amount in amounts):
        yield f"role {role.name}: an amount of a resource must be a number from 0 upwards."
    yield from (f"role {role.name}: {name} must not be negative." for name, limit in role.limits.items() if limit < 0)
