"""The description of a job. Names are imported at first use: daemons read `unified.job.spec` and need no more."""

from typing import TYPE_CHECKING

from unified import lazy

if TYPE_CHECKING:
    from unified.job.config import DLConfig as DLConfig
    from unified.job.config import JobConfig as JobConfig
    from unified.job.config import WorkloadGroup as WorkloadGroup
    from unified.job.entrypoint import get_entrypoint_type as get_entrypoint_type
    from unified.job.enums import ACCELERATOR_TYPE as ACCELERATOR_TYPE
    from unified.job.enums import AcceleratorType as AcceleratorType
    from unified.job.enums import DLStreamType as DLStreamType
    from unified.job.enums import DLType as DLType
    from unified.job.enums import ExecutionResultType as ExecutionResultType
    from unified.job.enums import FailoverExec as FailoverExec
    from unified.job.enums import FailoverTrigger as FailoverTrigger
    from unified.job.enums import MasterStage as MasterStage
    from unified.job.enums import MasterStateBackendType as MasterStateBackendType
    from unified.job.enums import RLRoleType as RLRoleType
    from unified.job.enums import WorkloadEntrypointType as WorkloadEntrypointType
    from unified.job.spec import JobSpec as JobSpec
    from unified.job.spec import RoleSpec as RoleSpec
    from unified.job.workloads import BaseWorkloadDesc as BaseWorkloadDesc
    from unified.job.workloads import CustomWorkloadDesc as CustomWorkloadDesc
    from unified.job.workloads import ElasticWorkloadDesc as ElasticWorkloadDesc
    from unified.job.workloads import NodeGroupFailoverDesc as NodeGroupFailoverDesc
    from unified.job.workloads import ResourceDesc as ResourceDesc
    from unified.job.workloads import SimpleWorkloadDesc as SimpleWorkloadDesc
    from unified.job.workloads import WorkloadDesc as WorkloadDesc

__getattr__, __dir__ = lazy.exports(__name__)
