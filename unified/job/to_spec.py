"""Conversion of the description that a user wrote to the record that daemons and workers read."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from unified.errors import UsageError
from unified.job import entrypoint, payload, requirements
from unified.job.config import JobConfig, device_share
from unified.job.driver import WORKING_DIR, Driver
from unified.job.report_to import REPORT_TO, check_report_to
from unified.job.spec import Communication, EngineOptions, EntryPoint, JobSpec, OutputFiles, Resources, RoleSpec
from unified.job.workloads import BaseWorkloadDesc, ElasticWorkloadDesc, ResourceDesc, SimpleWorkloadDesc

_CONVERTED = frozenset({"entry_point", "envs", "config", "output_files", "engine"})


def to_spec(config: JobConfig, driver: Driver | None = None) -> JobSpec:
    """Return the job as it is sent to the master.

    The workers' directory is the first of: `DLROVER_WORKING_DIR` in the role's own environment (left there for the
    worker), `working_dir=`, the variable in the job's environment or in the driver's, the driver's directory.
    JobError: a config or an entry point cannot be sent to workers. UsageError: the requirements cannot be read or come
    with `python`, or a tracker is not known.
    """
    driver = driver or Driver.here()
    job = config.dl_config
    working_dir = config.working_dir or job.global_envs.get(WORKING_DIR) or driver.working_dir
    if config.requirements and config.python is not None:
        raise UsageError("python= and requirements= are two interpreters of one job: give one of them.")
    return JobSpec(
        name=config.job_name,
        roles=[_role(name, config, driver) for name in job.workloads],
        node_num=job.node_number,
        device_per_node=job.device_per_node,
        may_share_nodes=job.may_share_nodes,
        accelerator_type=job.accelerator_type.value,
        dl_type=job.dl_type.value,
        stream_type=job.stream_type.value,
        user_config=payload.encode(job.user_config, "user config"),
        node_max_restart=config.node_max_restart,
        job_max_restart=config.job_max_restart,
        master_max_restart=config.master_max_restart,
        master_cpu=config.master_cpu if "master_cpu" in config.model_fields_set else 0,
        master_memory_mb=config.master_mem if "master_mem" in config.model_fields_set else 0,
        master_isolation_resource=config.master_isolation_schedule_resource,
        worker_isolation_resource=config.worker_isolation_schedule_resource,
        failover_trigger=config.failover_trigger_strategy,
        failover_exec=config.failover_exec_strategy,
        restart_window_s=job.restart_window if config.restart_window is None else config.restart_window,
        restart_backoff_s=config.restart_backoff,
        stop_grace_s=config.stop_grace_s,
        save_grace_s=config.save_grace_s,
        call_timeout_s=config.call_timeout_s,
        python=config.python,
        start_method=config.start_method,
        preload=job.preload,
        working_dir=working_dir,
        requirements=requirements.read(config.requirements, working_dir),
        sys_path=driver.sys_path,
        submitted_by=driver.submitted_by,
    )


def _role(name: str, config: JobConfig, driver: Driver) -> RoleSpec:
    job = config.dl_config
    workload = job.workloads[name]
    shared = {key: value for key, value in job.global_envs.items() if not (config.working_dir and key == WORKING_DIR)}
    named = config.report_to if isinstance(config.report_to, str) else ",".join(config.report_to)
    trackers = {REPORT_TO: named} if named else {}
    failover = workload.node_group_failover
    grouped = sum(other.group == workload.group for other in job.workloads.values()) if workload.group else 1
    elastic = workload if isinstance(workload, ElasticWorkloadDesc) else None
    engine = workload.engine if isinstance(workload, SimpleWorkloadDesc) else None
    entry_point = _entry_point(name, workload.entry_point)
    hang_timeout = config.hang_timeout if elastic and workload.hang_timeout is None else workload.hang_timeout
    return RoleSpec(
        **{field: getattr(workload, field) for field in same_fields(type(workload))},
        name=name,
        kind=workload.backend,
        entry_point=replace(entry_point, argv=engine.command) if engine else entry_point,
        engine=EngineOptions(**engine.model_dump()) if engine else None,
        collocation=workload.group,
        resources=_resources(workload.resource, grouped),
        envs=check_report_to({**driver.env, **trackers, **shared, **workload.envs}),
        config=payload.encode(workload.config, f"config of role {name}"),
        hang_timeout_s=hang_timeout or None,
        communication=_communication(elastic) if elastic else Communication(),
        output_files=OutputFiles(**elastic.output_files.model_dump()) if elastic and elastic.output_files else None,
        failover_label=failover.group_label_key if failover.enabled else None,
        failover_timeout_s=failover.timeout,
    )


def same_fields(kind: type[BaseWorkloadDesc]) -> list[str]:
    """Return the fields that have the same name and value in a description and its `RoleSpec`."""
    return [field for field in RoleSpec.__struct_fields__ if field in kind.model_fields and field not in _CONVERTED]


def _entry_point(role: str, given: Any) -> EntryPoint:
    if isinstance(given, str):
        return entrypoint.parse(given)
    module, name = entrypoint.name_of(given)
    code = payload.encode_code(given, f"entry point {name!r} of role {role}")
    return EntryPoint(kind="value", target=module, attribute=name, code=code)


def _resources(resource: ResourceDesc, num_roles: int) -> Resources:
    return Resources(
        cpu=resource.cpu,
        memory_mb=resource.memory,
        disk_mb=resource.disk,
        accelerator=device_share(resource.accelerator, num_roles),
        user_defined=dict(resource.user_defined),
    )


def _communication(workload: ElasticWorkloadDesc) -> Communication:
    return Communication(
        pre_check=workload.comm_pre_check,
        auto_setup=workload.comm_auto_setup_process_group,
        backend=workload.comm_backend,
        timeout_s=workload.comm_timeout_s,
        port=workload.comm_port,
        run_id=workload.comm_run_id,
    )
