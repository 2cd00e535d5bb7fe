"""The description of a job. Names are imported at first use: daemons read `unified.job.spec` and need no more."""

from typing import TYPE_CHECKING

from unified import lazy

if TYPE_CHECKING:
    from unified.job.config import DLConfig, JobConfig, WorkloadGroup
    from unified.job.entrypoint import get_entrypoint_type
    from unified.job.enums import (
        ACCELERATOR_TYPE,
        AcceleratorType,
        DLStreamType,
        DLType,
        ExecutionResultType,
        FailoverExec,
        FailoverTrigger,
        MasterStage,
        MasterStateBackendType,
        RLRoleType,
        WorkloadEntrypointType,
    )
    from unified.job.spec import JobSpec, RoleSpec
    from unified.job.workloads import (
        BaseWorkloadDesc,
        CustomWorkloadDesc,
        ElasticWorkloadDesc,
        NodeGroupFailoverDesc,
        ResourceDesc,
        SimpleWorkloadDesc,
        WorkloadDesc,
    )

__all__ = [
    "ACCELERATOR_TYPE",
    "AcceleratorType",
    "BaseWorkloadDesc",
    "CustomWorkloadDesc",
    "DLConfig",
    "DLStreamType",
    "DLType",
    "ElasticWorkloadDesc",
    "ExecutionResultType",
    "FailoverExec",
    "FailoverTrigger",
    "JobConfig",
    "JobSpec",
    "MasterStage",
    "MasterStateBackendType",
    "NodeGroupFailoverDesc",
    "RLRoleType",
    "ResourceDesc",
    "RoleSpec",
    "SimpleWorkloadDesc",
    "WorkloadDesc",
    "WorkloadEntrypointType",
    "WorkloadGroup",
    "get_entrypoint_type",
]

__getattr__, __dir__ = lazy.exports(
    __name__,
    {
        "unified.job.config": ["DLConfig", "JobConfig", "WorkloadGroup"],
        "unified.job.entrypoint": ["get_entrypoint_type"],
        "unified.job.enums": [
            "ACCELERATOR_TYPE",
            "AcceleratorType",
            "DLStreamType",
            "DLType",
            "ExecutionResultType",
            "FailoverExec",
            "FailoverTrigger",
            "MasterStage",
            "MasterStateBackendType",
            "RLRoleType",
            "WorkloadEntrypointType",
        ],
        "unified.job.spec": ["JobSpec", "RoleSpec"],
        "unified.job.workloads": [
            "BaseWorkloadDesc",
            "CustomWorkloadDesc",
            "ElasticWorkloadDesc",
            "NodeGroupFailoverDesc",
            "ResourceDesc",
            "SimpleWorkloadDesc",
            "WorkloadDesc",
        ],
    },
)
