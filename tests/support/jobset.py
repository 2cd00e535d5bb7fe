"""JobSets without their controller: what it makes of one, and what its schema and its admission refuse.

The schema is that of a client (`kubeflow-trainer-api`), whose models drop fields that they do not know: what is lost
on the way through them is refused here. The rules of admission and the names are those of kubernetes-sigs/jobset,
written down by hand: no controller runs here.
"""

import copy
import re
from collections.abc import Iterator
from typing import Any

Object = dict[str, Any]
VERSION = "jobset.x-k8s.io/v1alpha2"
RESTART_STRATEGIES = {"Recreate", "BlockingRecreate", "InPlaceRestart"}
ACTIONS = {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"}
REASONS = {"BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"}


def made_of(each: Object) -> list[Object]:
    """Return the Jobs and the headless Service that the controller makes of a JobSet; of another object, itself."""
    if each["kind"] != "JobSet":
        return [each]
    spec, name = each["spec"], each["metadata"]["name"]
    label = {"jobset.sigs.k8s.io/jobset-name": name}
    service = {
        "clusterIP": "None",
        "selector": label,
        "publishNotReadyAddresses": spec["network"].get("publishNotReadyAddresses", True),
    }
    made = [{"apiVersion": "v1", "kind": "Service", "metadata": {"name": subdomain_of(each)}, "spec": service}]
    for replicated in spec["replicatedJobs"]:
        for number in range(replicated.get("replicas", 1)):
            job = copy.deepcopy(replicated["template"]["spec"])
            job["template"]["metadata"]["labels"] |= label
            job["template"]["spec"]["subdomain"] = subdomain_of(each)
            metadata = {"name": f"{name}-{replicated['name']}-{number}"}
            made.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job})
    return made


def subdomain_of(jobset: Object) -> str:
    return str(jobset["spec"]["network"].get("subdomain", jobset["metadata"]["name"]))


def driver_job_of(jobset: Object) -> str:
    """Return the name of the Job whose success is that of the JobSet."""
    (name,) = jobset["spec"]["successPolicy"]["targetReplicatedJobs"]
    return f"{jobset['metadata']['name']}-{name}-0"


def model_faults(jobset: Object) -> Iterator[str]:
    """Yield what the models refuse: a wrong type, a field that is missing, and one that they do not know."""
    # Here, as its hundreds of models take half a second, in each process that collects this test.
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    if jobset.get("apiVersion") != VERSION:
        yield f"JobSet: {jobset.get('apiVersion')} is not {VERSION}"
    try:
        known = JobsetV1alpha2JobSet.from_dict(jobset)
        assert known is not None
        yield from _differences(jobset, known.to_dict(), "JobSet")
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        yield f"JobSet: {error!r}"


def _differences(given: Any, kept: Any, path: str) -> Iterator[str]:
    if isinstance(given, dict) and isinstance(kept, dict):
        yield from (f"{path} has no field {key}" for key in given.keys() - kept.keys())
        # A word that is needed and missing is taken as an empty one; other fields that were added are defaults.
        yield from (f"{path} needs a field {key}" for key in kept.keys() - given.keys() if kept[key] == "")
        for key in given.keys() & kept.keys():
            yield from _differences(given[key], kept[key], f"{path}.{key}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for number, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from _differences(one, other, f"{path}[{number}]")
    elif given != kept:
        yield f"{path}: {given!r} is taken as {kept!r}"


def rule_faults(jobset: Object) -> Iterator[str]:
    """Yield what admission refuses, and what would make a JobSet another run than the Job is."""
    spec, labels = jobset["spec"], jobset["metadata"]["labels"]
    names = [each["name"] for each in spec["replicatedJobs"]]
    jobs = dict(zip(names, (each["template"]["spec"] for each in spec["replicatedJobs"]), strict=True))
    network, success, failure = spec["network"], spec["successPolicy"], spec["failurePolicy"]
    if network["enableDNSHostnames"] is not True or network["publishNotReadyAddresses"] is not True:
        yield f"pods are not reached by their names before they are ready: {network}"
    if [each.get("replicas", 1) for each in spec["replicatedJobs"]] != [1] * len(names):
        yield "a job is there several times"
    targets = success["targetReplicatedJobs"]
    if success["operator"] != "All" or len(targets) != 1 or targets[0] not in names:
        yield f"it succeeds with others than the driver's job: {success}, of {names}"
    elif jobs[targets[0]]["completions"] != 1 or jobs[targets[0]]["backoffLimitPerIndex"] != 0:
        yield "the driver's pod comes back alone after it was killed, or is one of several"
    if failure["restartStrategy"] not in RESTART_STRATEGIES:
        yield f"there is no restart strategy {failure['restartStrategy']}"
    if len({rule["name"] for rule in failure["rules"]}) < len(failure["rules"]):
        yield "two rules have one name"
    for rule in failure["rules"]:
        if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"]) or rule["action"] not in ACTIONS:
            yield f"{rule['name']} is no name of a rule, or {rule['action']} no action"
        if not REASONS.issuperset(rule.get("onJobFailureReasons", [])):
            yield f"{rule['onJobFailureReasons']} are no reasons of a Job's failure"
        if not set(names).issuperset(rule.get("targetReplicatedJobs", [])):
            yield f"{rule['targetReplicatedJobs']} are not all of {names}"
    failing = [rule for rule in failure["rules"] if rule["action"] == "FailJobSet"]
    if ["PodFailurePolicy"] not in [rule.get("onJobFailureReasons") for rule in failing]:
        yield "a driver that ended by itself is started again"
    if {*names} - {*targets} != {name for rule in failing for name in rule.get("targetReplicatedJobs", [])}:
        yield "agents that were killed too often are started again"
    for name, job in jobs.items():
        longest = f"{jobset['metadata']['name']}-{name}-0-{job['completions'] - 1}-abcde"
        if len(longest) > 63:
            yield f"{longest} is too long for a pod"
        if (
            labels.items()
            - job["template"]["metadata"]["labels"].items()
            - {("kueue.x-k8s.io/queue-name", labels.get("kueue.x-k8s.io/queue-name"))}
        ):
            yield f"its labels are not those of the pods of {name}"
        if job["template"]["spec"]["subdomain"] != subdomain_of(jobset):
            yield f"pods of {name} ask for a subdomain that they do not get"
