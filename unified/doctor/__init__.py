"""Checks of a host, and of its connection to the cluster, before a job hangs."""

from unified.doctor.cluster import examine_cluster
from unified.doctor.host import examine_host
from unified.doctor.judgement import Finding, Severity

__all__ = ["Finding", "Severity", "examine_cluster", "examine_host"]
