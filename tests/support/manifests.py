"""Checks of manifests without an API server: the schemas of Kubernetes, and what schemas cannot say of our own."""

import re
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import yaml  # type: ignore[import-untyped]

import unified_agent.cli
import unified_gateway.cli
import unified_master.cli
from tests.support.jobset import driver_job_of, made_of, model_faults, rule_faults
from unified.cli.main import build
from unified.config.addresses import parse_flag
from unified.errors import UsageError
from unified.kubernetes.options import amount
from unified.probes import parse_bind

Object = dict[str, Any]
VERSIONS = ("1.30", "1.37")
WORKLOADS = ("StatefulSet", "DaemonSet", "Deployment", "Job")
FIELDS = {
    "metadata.name",
    "status.podIP",
    "spec.nodeName",
    "metadata.annotations['batch.kubernetes.io/job-completion-index']",
}
PARSERS = {
    "unified-master": unified_master.cli.build_parser,
    "unified-agent": unified_agent.cli.build_parser,
    "unified-gateway": unified_gateway.cli.build_parser,
}


LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""By libyaml where it is there, ten times as quick."""


def read(text: str) -> list[Object]:
    return list(yaml.load_all(text, Loader=LOADER))


def schema_faults(objects: list[Object]) -> Iterator[str]:
    """Yield what the schemas of Kubernetes refuse; unknown fields are refused, too."""
    for each in objects:
        if each.get("kind") == "JobSet":  # no kind of Kubernetes itself, but its Jobs are
            faults = list(model_faults(each))
            yield from faults or schema_faults(made_of(each))
            continue
        for version in VERSIONS:
            try:
                assert kubernetes_validate.validate(each, version, strict=True) == version
            except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError, KeyError) as error:
                yield f"{each.get('kind')} in {version}: {error}"


def cross_faults(text: str) -> Iterator[str]:
    """Yield what does not fit together in the manifests of one call of `unified kubernetes render`."""
    objects = read(text)
    try:
        yield from Manifests(objects, text).faults()
    except (KeyError, TypeError, IndexError, AttributeError) as error:  # the schema says the same, better
        yield f"a field is missing or is something else: {error!r}"


def template_of(workload: Object) -> Object:
    return dict(workload["spec"]["template"])


def container_of(workload: Object) -> Object:
    (one,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(one)


class Manifests:
    def __init__(self, objects: list[Object], text: str) -> None:
        self.objects = objects
        made = [child for each in objects for child in made_of(each)]
        self.workloads = [each for each in made if each["kind"] in WORKLOADS]
        self.services = {each["metadata"]["name"]: each for each in made if each["kind"] == "Service"}
        sets = [each for each in objects if each["kind"] == "JobSet"]
        self.driver_jobs = {job["metadata"]["name"]: driver_job_of(each) for each in sets for job in made_of(each)}
        secrets = re.findall(r"create secret generic (\S+) --from-(?:file|literal)=([^=\s]+)", text)
        self.secrets = {(name, key) for name, key in secrets}

    def faults(self) -> Iterator[str]:
        names = [(each["kind"], each["metadata"]["name"]) for each in self.objects]
        if len(set(names)) < len(names):
            yield f"two objects have one name: {names}"
        if len({each["metadata"].get("namespace") for each in self.objects}) != 1:
            yield "not all objects are in one namespace"
        for each in self.objects:
            yield from (f"{each['kind']} {each['metadata']['name']}: {fault}" for fault in self.faults_of(each))
        for each in self.workloads:
            name = f"{each['kind']} {each['metadata']['name']}"
            yield from (f"{name}: {fault}" for fault in self.faults_of_pod(each))
            yield from (f"{name}: {fault}" for fault in self.faults_of_command(each))

    def selected(self, selector: Object) -> list[Object]:
        return [each for each in self.workloads if selector.items() <= template_of(each)["metadata"]["labels"].items()]

    def faults_of(self, each: Object) -> Iterator[str]:
        spec = each["spec"]
        if each["kind"] == "JobSet":
            yield from rule_faults(each)
            for job in made_of(each)[1:]:
                yield from self.faults_of_job(job["spec"])
            return
        selector = spec.get("podSelector") or spec.get("selector") or spec["template"]["metadata"]["labels"]
        for words in ("matchLabels", "labels"):
            selector = selector.get(words, selector)
        labels = {key: value for key, value in each["metadata"]["labels"].items() if "kueue" not in key}
        if labels != selector:
            yield f"its labels are not those of its pods, {selector}"
        match each["kind"]:
            case "Service":
                found = self.selected(spec["selector"])
                if len(found) != 1:
                    yield f"it selects the pods of {len(found)} workloads"
                for port in spec["ports"]:
                    for workload in found:
                        known = {one["name"]: one["containerPort"] for one in container_of(workload)["ports"]}
                        if known.get(port["targetPort"]) != port["port"]:
                            yield f"port {port['port']} goes to {port['targetPort']}, of {known}"
            case "PodDisruptionBudget":
                if not self.selected(spec["selector"]["matchLabels"]):
                    yield "it selects no pod"
            case "NetworkPolicy":
                selected = self.selected(spec["podSelector"]["matchLabels"])
                if not selected:
                    yield "it selects no pod"
                ports = {port["name"] for workload in selected for port in container_of(workload)["ports"]}
                for rule in spec["ingress"]:
                    for port in rule.get("ports", []):
                        if port["port"] not in ports:
                            yield f"no container has a port {port['port']}"
                    for peer in rule.get("from", []):
                        labels = peer["podSelector"]["matchLabels"]
                        if not self.selected(labels) and not all(key.endswith("-client") for key in labels):
                            yield f"no pod has the labels {labels}"
            case "StatefulSet":
                if spec["serviceName"] not in self.services:
                    yield f"there is no Service {spec['serviceName']}"
            case "Job":
                if [rule["succeededIndexes"] for rule in spec["successPolicy"]["rules"]] != ["0"]:
                    yield "it succeeds with others than the driver's pod"
                yield from self.faults_of_job(spec)
        if each["kind"] in WORKLOADS and each["kind"] != "Job":
            if not spec["selector"]["matchLabels"].items() <= template_of(each)["metadata"]["labels"].items():
                yield "its selector does not select its own pods"
            if each not in self.selected(spec["selector"]["matchLabels"]):
                yield "it does not select its pods"

    def faults_of_job(self, spec: Object) -> Iterator[str]:
        if spec["completions"] != spec["parallelism"] or spec["completionMode"] != "Indexed":
            yield "not all pods are there at once"
        pod = spec["template"]["spec"]
        if pod["restartPolicy"] != "Never":
            yield "a podFailurePolicy needs restartPolicy Never"
        headless = self.services.get(pod["subdomain"], {"spec": {}})["spec"]
        if headless.get("clusterIP") != "None" or not headless.get("publishNotReadyAddresses"):
            yield f"{pod['subdomain']} is no headless Service that publishes pods which are not ready"
        if [rule["action"] for rule in spec["podFailurePolicy"]["rules"]] != ["Ignore", "FailJob"]:
            yield "evictions are counted, or the driver's own end is"
        for rule in spec["podFailurePolicy"]["rules"]:
            if rule["action"] == "Ignore" and [each["type"] for each in rule["onPodConditions"]] != [
                "DisruptionTarget"
            ]:
                yield "evictions are counted"
            if "onExitCodes" in rule and rule["onExitCodes"]["containerName"] not in {
                container["name"] for container in pod["containers"]
            }:
                yield "its rule for exit codes names no container"

    def faults_of_pod(self, workload: Object) -> Iterator[str]:
        pod, container = template_of(workload)["spec"], container_of(workload)
        claims = {each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", [])}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        if mounts.keys() != volumes.keys() | claims:
            yield f"mounts {sorted(mounts)} are not the volumes {sorted(volumes.keys() | claims)}"
        if len(set(mounts.values())) < len(mounts):
            yield f"two volumes have one place: {mounts}"
        env = {each["name"]: each for each in container["env"]}
        if len(env) < len(container["env"]):
            yield "a variable is there twice"
        yield from self.faults_of_files(volumes, mounts, env)
        for name, each in env.items():
            source = each.get("valueFrom", {})
            if (path := source.get("fieldRef", {}).get("fieldPath")) and path not in FIELDS:
                yield f"{name} is of a field {path}"
            if (ref := source.get("secretKeyRef")) and (ref["name"], ref["key"]) not in self.secrets:
                yield f"{name} is of a Secret {ref} that nobody is told to make"
        for reference in re.findall(r"\$\((\w+)\)", " ".join(container["args"])):
            if reference not in env:
                yield f"no variable {reference}"
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if container[probe]["httpGet"]["port"] not in ports:
                yield f"{probe} asks a port {container[probe]['httpGet']['port']}"
        asked = {probe: container[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")}
        expected = "/healthz" if container["command"] == ["unified-gateway"] else "/readyz"
        if asked != {"livenessProbe": "/healthz", "readinessProbe": expected}:
            yield f"the probes ask for {asked}"
        amounts = container["resources"]
        for name, number in amounts["limits"].items():
            if "/" in name and amounts["requests"].get(name) != number:
                yield f"requests and limits of {name} differ"
        if any("/" in name and name not in amounts["limits"] for name in amounts["requests"]):
            yield "a device is requested without a limit"
        for volume in volumes.values():
            shm = volume.get("emptyDir", {}).get("sizeLimit")
            if shm and amount("shm", shm) > amount("memory", amounts["limits"]["memory"]):
                yield f"/dev/shm of {shm} does not fit into the memory"
        context = {**pod["securityContext"], **container["securityContext"]}
        wanted = {"runAsNonRoot": True, "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
        is_closed = wanted.items() <= context.items() and context["seccompProfile"] == {"type": "RuntimeDefault"}
        if not is_closed or context["capabilities"]["drop"] != ["ALL"] or not context["fsGroup"]:
            yield f"it has rights that it does not need: {context}"
        if pod["automountServiceAccountToken"] or pod["enableServiceLinks"]:
            yield "it is given a token, or variables of Services"

    def faults_of_files(self, volumes: Object, mounts: dict[str, str], env: Object) -> Iterator[str]:
        files = {}
        for name, volume in volumes.items():
            if secret := volume.get("secret"):
                for item in secret["items"]:
                    files[f"{mounts.get(name)}/{item['path']}"] = secret["defaultMode"]
                    if (secret["secretName"], item["key"]) not in self.secrets:
                        yield f"nobody is told to make {item['key']} of Secret {secret['secretName']}"
        if files.get(env["UNIFIED_KEY_FILE"]["value"]) != 0o440:
            yield f"UNIFIED_KEY_FILE is none of {files} with mode 0440"
        writable = [path for name, path in mounts.items() if "secret" not in volumes.get(name, {})]
        for name in ("HOME", "UNIFIED_HOME", "UNIFIED_RUN_DIR"):
            if not any(f"{env[name]['value']}/".startswith(f"{path}/") for path in writable):
                yield f"{name} lies in no volume"
        if env["UNIFIED_RUN_DIR"]["value"] in writable:
            yield "UNIFIED_RUN_DIR is a mount, which belongs to root"

    def faults_of_command(self, workload: Object) -> Iterator[str]:
        container = container_of(workload)
        words = [re.sub(r"\$\(\w+\)", "0", word) for word in [*container["command"], *container["args"]]]
        try:
            arguments = parse(words)
        except (UsageError, SystemExit, ValueError) as error:
            yield f"{shlex.join(words)} is no command line: {error}"
            return
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        if "health" in ports:
            bind = parse_bind(arguments.health_bind)
            if bind is None or bind.host != "0.0.0.0" or bind.port != ports["health"]:
                yield f"the probes ask port {ports['health']}, and it listens on {bind}"
        if getattr(arguments, "master", None):
            yield from self.faults_of_master(arguments.master)
        match container["command"]:
            case ["unified-master"]:
                binds = {"control": arguments.bind, "relay": arguments.relay_bind}
                for name, address in binds.items():
                    if parse_flag(name, address).port != ports[name]:
                        yield f"it listens on {address}, and its port {name} is {ports[name]}"
                if arguments.advertise not in self.services:
                    yield f"it is advertised as {arguments.advertise}, which is no Service"
            case ["unified-gateway"]:
                if arguments.port != ports["http"] or arguments.host != "0.0.0.0":
                    yield f"it listens on {arguments.host}:{arguments.port}, and its port is {ports['http']}"
            case ["unified", *_]:
                name = workload["metadata"]["name"]
                first = self.driver_jobs.get(name, name)
                if arguments.master_host != f"{first}-0.{template_of(workload)['spec']['subdomain']}":
                    yield f"the first pod is not {arguments.master_host}"
                if arguments.node_id != f"{name}-0":
                    yield f"the pods are not {arguments.node_id}"
                if template_of(workload)["spec"]["terminationGracePeriodSeconds"] < arguments.grace + 30:
                    yield "pods have less time than their workers"

    def faults_of_master(self, address: str) -> Iterator[str]:
        found = parse_flag("--master", address)
        ports = [port["port"] for port in self.services.get(found.host, {"spec": {"ports": []}})["spec"]["ports"]]
        if found.port not in ports:
            yield f"{address} is no port of a Service"


def parse(words: list[str]) -> Namespace:
    """Return what the program of a command line makes of its words."""
    program, *rest = words
    if program != "unified":
        if program not in PARSERS:
            raise ValueError(f"{program} is none of our programs")
        return PARSERS[program]().parse_args(rest)
    before = rest[: rest.index("--")] if "--" in rest else rest
    parser: ArgumentParser = build(before)
    return parser.parse_args(rest)
