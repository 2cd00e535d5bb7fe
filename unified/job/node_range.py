"""A job whose elastic roles name a range of nodes, made one for as many nodes as there are."""

from __future__ import annotations

import msgspec

from unified.job.spec import JobSpec, RoleSpec


def has_range(role: RoleSpec) -> bool:
    """Return True if the role gives a range for its number of nodes instead of one number."""
    return role.min_nodes is not None and role.max_nodes is not None and role.min_nodes < role.max_nodes


def with_nodes(spec: JobSpec, num_nodes: int) -> JobSpec:
    """The job for a cluster of so many nodes: each range becomes the number within it that is nearest."""
    roles = [_with_nodes(role, num_nodes) if has_range(role) else role for role in spec.roles]
    if roles == spec.roles:
        return spec
    only = roles[0] if len(roles) == 1 else None
    node_num = min(spec.node_num, only.num_groups) if only else spec.node_num
    return msgspec.structs.replace(spec, roles=roles, node_num=node_num)


def _with_nodes(role: RoleSpec, num_nodes: int) -> RoleSpec:
    number = max(role.min_nodes or 1, min(num_nodes, role.max_nodes or 1))
    return msgspec.structs.replace(role, total=number * role.per_group)
