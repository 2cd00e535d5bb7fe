"""Grafana dashboards of a cluster and of a job, written as JSON beside this file: ``python dashboards.py``.

Each panel is a line of a table below. `tests/monitoring` runs every query against a Prometheus that has scraped a demo
run, and compares the JSON with what this prints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = {"type": "prometheus", "uid": "${source}"}
COLUMNS = 24
JOB = 'job_id=~"$job"'


class Panel(NamedTuple):
    """One panel: its title, its queries with their legends, unit, kind and width in 24ths."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8


CLUSTER = (
    Panel("Master answers", (("unified_master_up", ""),), kind="stat", width=4),
    Panel("Nodes", (("unified_nodes", "{{state}}"),), kind="stat", width=8),
    Panel("Jobs", (("unified_jobs", "{{stage}}"),), kind="stat", width=12),
    Panel("Nodes by state", (("unified_nodes", "{{state}}"),)),
    Panel("Accelerators", (("sum by (state) (unified_devices)", "{{state}}"),)),
    Panel(
        "Share of accelerators held",
        (('sum(unified_devices{state="held"}) / sum(unified_devices{state!="lost"})', "held"),),
        "percentunit",
    ),
    Panel("CPUs", (("unified_cpus", "{{state}}"),)),
    Panel("Memory", (("unified_memory_bytes", "{{state}}"),), "bytes"),
    Panel("Workers of agents", (("sum by (state) (unified_agent_workers)", "{{state}}"),)),
    Panel(
        "Productive share of all jobs",
        (
            (
                'sum(delta(unified_job_time_seconds{phase="productive"}[5m]))'
                " / sum(delta(unified_job_time_seconds[5m]))",
                "productive",
            ),
        ),
        "percentunit",
        width=12,
    ),
    Panel("Restarts", (("sum by (job_id) (increase(unified_job_restarts_total[10m]))", "{{job_id}}"),), width=12),
    Panel("Nodes that are lost", (("unified_node_up == 0", "{{node}}"),), kind="table", width=12),
    Panel(
        "Limits with little left", (("unified_job_restarts_left <= 3", "{{job_id}} {{limit}}"),), kind="table", width=12
    ),
)
RUN = (
    Panel("Stage", ((f"unified_job_stage{{{JOB}}} == 1", "{{stage}}"),), kind="stat", width=6),
    Panel("Age", ((f"time() - unified_job_submitted_timestamp_seconds{{{JOB}}}", ""),), "s", "stat", 6),
    Panel(
        "Progress",
        ((f'unified_role_step{{{JOB},of="slowest"}} / on (job_id, role) unified_role_steps_target', "{{role}}"),),
        "percentunit",
        "gauge",
        12,
    ),
    Panel("Step", ((f"unified_role_step{{{JOB}}}", "{{role}} {{of}}"),), width=12),
    Panel(
        "Steps a second",
        ((f'clamp_min(delta(unified_role_step{{{JOB},of="fastest"}}[1m]) / 60, 0)', "{{role}}"),),
        width=12,
    ),
    Panel("Reported values", ((f'unified_role_reported{{{JOB},stat="mean"}}', "{{role}} {{name}}"),), width=12),
    Panel("Seconds by phase", ((f"unified_job_time_seconds{{{JOB}}}", "{{phase}}"),), "s", width=12),
    Panel("Workers", ((f"unified_job_workers{{{JOB}}} > 0", "{{role}} {{state}}"),)),
    Panel("Round", ((f"unified_role_round{{{JOB}}}", "{{role}}"),)),
    Panel("Restarts", ((f"unified_job_restarts_total{{{JOB}}}", "{{scope}}"),)),
    Panel("Memory of workers", ((f'unified_worker_memory_bytes{{{JOB},of="sum"}}', "{{role}}"),), "bytes"),
    Panel("Processors in use", ((f"sum by (role) (rate(unified_worker_cpu_seconds_total{{{JOB}}}[1m]))", "{{role}}"),)),
    Panel("Killed for want of memory", ((f"sum(unified_agent_oom_kills_total{{{JOB}}}) or vector(0)", ""),)),
)
GATEWAY = (
    Panel("Requests a second", (("sum by (route) (rate(unified_gateway_requests_total[1m]))", "{{route}}"),), width=12),
    Panel(
        "Time to an answer (p99)",
        (
            (
                "histogram_quantile(0.99, sum by (le, route) (rate(unified_gateway_request_seconds_bucket[5m])))",
                "{{route}}",
            ),
        ),
        "s",
        width=12,
    ),
    Panel("Answers by status", (("sum by (status) (rate(unified_gateway_requests_total[1m]))", "{{status}}"),)),
    Panel("Training runs", (("unified_gateway_runs", "{{status}}"),)),
    Panel("Readers of logs", (("unified_gateway_log_followers", ""),)),
    Panel("Agents that reach the master", (("sum(unified_agent_master_connected)", ""),)),
)
DASHBOARDS = {
    "cluster": ("Unified: cluster", CLUSTER),
    "job": ("Unified: job", RUN),
    "gateway": ("Unified: gateway", GATEWAY),
}


def dashboard(name: str) -> dict[str, Any]:
    """Return one dashboard as Grafana reads it."""
    title, panels = DASHBOARDS[name]
    made: list[dict[str, Any]] = []
    x = y = 0
    for number, panel in enumerate(panels, 1):
        height = 4 if panel.kind == "stat" else 8
        if x + panel.width > COLUMNS:
            x, y = 0, y + made[-1]["gridPos"]["h"]
        made.append(
            {
                "id": number,
                "title": panel.title,
                "type": panel.kind,
                "datasource": SOURCE,
                "gridPos": {"x": x, "y": y, "w": panel.width, "h": height},
                "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
                "targets": [
                    {"refId": chr(65 + index), "expr": query, "legendFormat": legend, "instant": panel.kind == "table"}
                    for index, (query, legend) in enumerate(panel.queries)
                ],
            }
        )
        x += panel.width
    variables: list[dict[str, Any]] = [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    ]
    if name == "job":
        query = "label_values(unified_job_info, job_id)"
        variables.append(
            {
                "name": "job",
                "label": "Job",
                "type": "query",
                "datasource": SOURCE,
                "query": query,
                "refresh": 2,
                "sort": 2,
            }
        )
    return {
        "uid": f"unified-{name}",
        "title": title,
        "tags": ["unified"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": made,
    }


def text_of(name: str) -> str:
    """Return the file of one dashboard."""
    return json.dumps(dashboard(name), indent=1) + "\n"


if __name__ == "__main__":
    for each in DASHBOARDS:
        Path(__file__).with_name(f"{each}.json").write_text(text_of(each))
