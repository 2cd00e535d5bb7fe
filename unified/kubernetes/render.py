"""Manifests from options: plain objects, which `to_yaml` writes as kubectl reads them.

Pods are hosts, not ranks: an agent starts and restarts the workers inside, and Kubernetes restarts only pods.
Nothing here needs a right in Kubernetes, so no pod has a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from unified.kubernetes.options import ClusterOptions, PodOptions, RunOptions

Object = dict[str, Any]
CONTROL_PORT, RELAY_PORT, HTTP_PORT, HEALTH_PORT = 7077, 7078, 8000, 8081
HOME, KEY_FOLDER = "/var/lib/unified", "/etc/unified"
MARGIN_S = 30
"""Seconds that a pod has beyond the grace period of its workers."""
KILLED = [134, 137, 139, 143]
"""Exit codes of a container that was killed: the pod is made again. Any other exit code is the result of the run."""
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_HEALTH_BIND = f"--health-bind=0.0.0.0:{HEALTH_PORT}"
_ENV = {
    "HOME": "/tmp",
    "USER": "unified",
    "UNIFIED_HOME": HOME,
    "UNIFIED_RUN_DIR": "/tmp/unified",
    "UNIFIED_KEY_FILE": f"{KEY_FOLDER}/cluster.key",
}
_EMPTY: Object = {"emptyDir": {}}


def cluster(options: ClusterOptions) -> list[Object]:
    """Return the objects of a cluster that stays: a master, its agents and, if asked for, a gateway."""
    clients = {"podSelector": {"matchLabels": {f"{options.name}-client": "true"}}}
    rules: list[Object] = [{"from": [clients], "ports": [{"port": "control"}, {"port": "relay"}]}]
    objects = [
        _service(options, "master", control=CONTROL_PORT, relay=RELAY_PORT),
        _master(options),
        _service(options, "agent", is_headless=True, health=HEALTH_PORT),
        _agents(options),
    ]
    if options.agents_as == "statefulset":  # a DaemonSet has no scale, so a budget would block every drain
        budget = {"maxUnavailable": 1, "selector": {"matchLabels": _labels(options, "agent")}}
        objects.append(_object(options, "policy/v1", "PodDisruptionBudget", "agent", budget))
    if options.gateway:
        rules.append({"ports": [{"port": "http"}]})  # open to everybody, because the gateway asks for a token
        objects += [_service(options, "gateway", http=HTTP_PORT), _gateway(options)]
    return [*objects, _network_policy(options, rules)]


def run(options: RunOptions) -> list[Object]:
    """Return the objects of one run: agents that end with its job. The first pod has the master and the driver, too."""
    policy = _network_policy(options, [])
    if options.jobset:
        return [_jobset(options), policy]
    service = _service(options, "run", is_headless=True, control=CONTROL_PORT, relay=RELAY_PORT)
    spec = {
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        **_job(options, options.name, options.name, options.num_agents, options.retries),
    }
    return [service, _queued(options, "batch/v1", "Job", spec), policy]


def to_yaml(objects: Iterable[Object], options: PodOptions) -> str:
    """Return the objects as YAML documents, below comments on the Secrets that have to exist first."""
    kubectl = "kubectl" + (f" --namespace {options.namespace}" if options.namespace else "")
    secrets = [f"{options.key_secret} --from-file=cluster.key"]
    if isinstance(options, ClusterOptions) and options.gateway:
        secrets.append(f'{_name(options, "gateway")} --from-literal=token="$(openssl rand -hex 24)"')
    lines = ["# First, once:", "#   unified key new cluster.key"]
    lines += [f"#   {kubectl} create secret generic {secret}" for secret in secrets]
    return "\n".join([*lines, "---\n".join(msgspec.yaml.encode(each).decode() for each in objects)])


def _master(options: ClusterOptions) -> Object:
    name, ports = _name(options, "master"), {"control": CONTROL_PORT, "relay": RELAY_PORT, "health": HEALTH_PORT}
    binds = [f"--bind=tcp://0.0.0.0:{CONTROL_PORT}", f"--relay-bind=tcp://0.0.0.0:{RELAY_PORT}"]
    amounts = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}
    claim: Object = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": options.storage}}}
    if options.storage_class:
        claim["storageClassName"] = options.storage_class
    container = {
        "command": ["unified-master"],
        "args": [*binds, f"--advertise={name}", _HEALTH_BIND],
        "ports": _ports(ports),
        "resources": amounts,
    }
    spec = {"serviceName": name, "replicas": 1, "selector": {"matchLabels": _labels(options, "master")}}
    spec["template"] = _pod(options, "master", container, {"state": (HOME, None)})
    spec["volumeClaimTemplates"] = [{"metadata": {"name": "state"}, "spec": claim}]
    return _object(options, "apps/v1", "StatefulSet", "master", spec)


def _agents(options: ClusterOptions) -> Object:
    is_set = options.agents_as == "statefulset"
    master = f"--master=tcp://{_name(options, 'master')}:{CONTROL_PORT}"
    container = {
        "command": ["unified-agent"],
        "args": [master, "--node-id=$(NODE_ID)", "--address=$(POD_IP)", _HEALTH_BIND],
        # Pods of a StatefulSet keep their name when they move. Those of a DaemonSet have random names, one on a node.
        "env": [_from_field("NODE_ID", "metadata.name" if is_set else "spec.nodeName")],
        "ports": _ports({"health": HEALTH_PORT}),
    }
    spec: Object = {"selector": {"matchLabels": _labels(options, "agent")}}
    if is_set:
        spec |= {"serviceName": _name(options, "agent"), "replicas": options.num_agents}
        spec["podManagementPolicy"] = "Parallel"
    spec["template"] = _agent_pod(options, "agent", container)
    return _object(options, "apps/v1", "StatefulSet" if is_set else "DaemonSet", "agent", spec)


def _gateway(options: ClusterOptions) -> Object:
    token = {"secretKeyRef": {"name": _name(options, "gateway"), "key": "token"}}
    master = f"--master=tcp://{_name(options, 'master')}:{CONTROL_PORT}"
    container = {
        "command": ["unified-gateway"],
        "args": [master, "--host=0.0.0.0", f"--port={HTTP_PORT}"],
        "env": [{"name": "TRAINER_API_TOKEN", "valueFrom": token}],
        "ports": _ports({"http": HTTP_PORT}),
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        **_probes("http", "/healthz"),
    }
    spec: Object = {"replicas": 1, "selector": {"matchLabels": _labels(options, "gateway")}}
    spec["template"] = _pod(options, "gateway", container, {"state": (HOME, _EMPTY)})
    return _object(options, "apps/v1", "Deployment", "gateway", spec)


def _jobset(options: RunOptions) -> Object:
    """Return a JobSet. Its controller makes the headless Service, and names pods NAME-REPLICATEDJOB-0-INDEX.

    When the first pod is killed, its Job fails, and all pods are made again once the old ones are gone. The JobSet
    fails if the driver or an agent ends by itself, or if an agent is killed too often.
    """
    first = f"{options.name}-first-0"
    jobs = {"first": _job(options, first, first, 1, 0)}
    rules: list[Object] = [{"name": "ended", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
    if options.num_agents > 1:
        jobs["others"] = _job(options, f"{options.name}-others-0", first, options.num_agents - 1, options.retries)
        rules.append({"name": "killed", "action": "FailJobSet", "targetReplicatedJobs": ["others"]})
    spec: Object = {
        "network": {"enableDNSHostnames": True, "subdomain": options.name, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["first"]},
        "failurePolicy": {"maxRestarts": options.retries, "restartStrategy": "BlockingRecreate", "rules": rules},
        "replicatedJobs": [{"name": name, "replicas": 1, "template": {"spec": job}} for name, job in jobs.items()],
    }
    return _queued(options, "jobset.x-k8s.io/v1alpha2", "JobSet", spec)


def _queued(options: RunOptions, version: str, kind: str, spec: Object) -> Object:
    """Return the object. With a queue, it is suspended until Kueue has resources for all its pods."""
    queued = _object(options, version, kind, "run", {"suspend": True, **spec} if options.queue else spec)
    queued["metadata"]["labels"] |= {"kueue.x-k8s.io/queue-name": options.queue} if options.queue else {}
    return queued


def _job(options: RunOptions, name: str, first: str, num_pods: int, retries: int) -> Object:
    """Return the spec of an Indexed Job, whose pods are NAME-INDEX.

    Args:
        first: name of the Job whose pod 0 has the master and the driver.
    """
    container = {
        "command": ["unified", "kubernetes", "pod"],
        "args": [
            f"--node-id={name}-$(JOB_INDEX)",
            "--address=$(POD_IP)",
            f"--master-host={first}-0.{options.name}",
            _HEALTH_BIND,
            f"--grace={options.grace}",
            "--",
            *options.command,
        ],
        "env": [_from_field("JOB_INDEX", _INDEX)],
        "ports": _ports({"control": CONTROL_PORT, "relay": RELAY_PORT, "health": HEALTH_PORT}),
    }
    template = _agent_pod(options, "run", container)
    template["spec"] |= {"restartPolicy": "Never", "subdomain": options.name}
    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    ended = {"containerName": "run", "operator": "NotIn", "values": KILLED}
    return {
        "completionMode": "Indexed",
        "completions": num_pods,
        "parallelism": num_pods,
        "backoffLimitPerIndex": retries,
        "maxFailedIndexes": 0,
        "podFailurePolicy": {"rules": [evicted, {"action": "FailJob", "onExitCodes": ended}]},
        "template": template,
    }


def _network_policy(options: PodOptions, rules: Iterable[Object]) -> Object:
    """Let the pods of the cluster reach each other, and other clients as the rules say."""
    own = {"from": [{"podSelector": {"matchLabels": _labels(options)}}]}
    spec = {"podSelector": {"matchLabels": _labels(options)}, "policyTypes": ["Ingress"], "ingress": [own, *rules]}
    return _object(options, "networking.k8s.io/v1", "NetworkPolicy", "", spec)


def _service(options: PodOptions, component: str, *, is_headless: bool = False, **ports: int) -> Object:
    spec: Object = {"selector": _labels(options, component)}
    if is_headless:  # the first pod of a run is looked up while its probes still fail
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    spec["ports"] = [{"name": name, "port": port, "targetPort": name} for name, port in ports.items()]
    return _object(options, "v1", "Service", component, spec)


def _object(options: PodOptions, version: str, kind: str, component: str, spec: Object) -> Object:
    namespace = {"namespace": options.namespace} if options.namespace else {}
    metadata = {"name": _name(options, component), **namespace, "labels": _labels(options, component)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _name(options: PodOptions, component: str) -> str:
    return f"{options.name}-{component}" if component not in ("", "run") else options.name


def _labels(options: PodOptions, component: str = "") -> dict[str, str]:
    """Return the labels of a component; without one, the labels that all objects have."""
    labels = {"app.kubernetes.io/name": "unified", "app.kubernetes.io/instance": options.name}
    return {**labels, "app.kubernetes.io/component": component} if component else labels


def _agent_pod(options: PodOptions, component: str, container: Object) -> Object:
    """Return the template of a pod with an agent: its devices, claims, nodes and network."""
    amounts = {"cpu": options.cpus, "memory": options.memory}
    amounts |= {options.gpu_resource: str(options.gpus)} if options.gpus else {}
    amounts |= {name: str(number) for name, number in options.resource.items()}
    # Requests equal limits: the agent offers what its control group allows, and the pod is not the first to be evicted.
    container["resources"] = {"requests": amounts, "limits": dict(amounts)}
    container["env"] += [_from_field("POD_IP", "status.podIP"), *_variables(options.env)]
    volumes: dict[str, tuple[str, Object | None]] = {
        "state": (HOME, _EMPTY),
        "shm": ("/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": options.shm_size}}),
    }
    for number, (claim, path) in enumerate(options.claim.items()):
        volumes[f"claim-{number}"] = path, {"persistentVolumeClaim": {"claimName": claim}}
    template = _pod(options, component, container, volumes)
    spec = template["spec"]
    if any(name.startswith("rdma/") for name in options.resource):  # RDMA registers memory with the adapter
        spec["containers"][0]["securityContext"]["capabilities"]["add"] = ["IPC_LOCK"]
    if options.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    selector = dict(options.node_selector)
    is_everywhere = isinstance(options, ClusterOptions) and options.agents_as == "daemonset" and not selector
    if is_everywhere and options.gpus and options.gpu_resource == "nvidia.com/gpu":
        selector = {"nvidia.com/gpu.present": "true"}  # the label of NVIDIA's feature discovery
    spec |= {"nodeSelector": selector} if selector else {}
    if options.gpus:
        spec["tolerations"] = [{"key": options.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}]
    spec |= {"schedulerName": options.scheduler} if options.scheduler else {}
    return template


def _pod(options: PodOptions, component: str, own: Object, volumes: Mapping[str, tuple[str, Object | None]]) -> Object:
    """Return the template of a pod.

    Args:
        own: fields of its container.
        volumes: path and source of each, besides the key and /tmp; None: the source is a claim's template.
    """
    key = {
        "secretName": options.key_secret,
        "defaultMode": 0o440,
        "items": [dict.fromkeys(("key", "path"), "cluster.key")],
    }
    volumes = {**volumes, "tmp": ("/tmp", _EMPTY), "key": (KEY_FOLDER, {"secret": key})}
    mounts: list[Object] = [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()]
    mounts[-1]["readOnly"] = True
    container: Object = {
        "name": component,
        "image": options.image,
        **dict.fromkeys(("command", "args", "env")),  # sets the order of the fields to the usual one
        **_probes("health", "/readyz"),
        **own,
        "env": [*_variables(_ENV), *own.get("env", [])],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }
    spec: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # the variables of a Service unified-master would look like ours
        "terminationGracePeriodSeconds": options.grace + MARGIN_S,
        "securityContext": {
            "runAsNonRoot": True,
            **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), options.uid),
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": name, **source} for name, (_, source) in volumes.items() if source is not None],
    }
    spec |= {"serviceAccountName": options.service_account} if options.service_account else {}
    return {"metadata": {"labels": _labels(options, component)}, "spec": spec}


def _probes(port: str, ready: str) -> Object:
    """Return the probes of a container that has 120 s to start."""

    def probe(path: str, period_s: int, failures: int) -> Object:
        get = {"path": path, "port": port}
        return {"httpGet": get, "periodSeconds": period_s, "timeoutSeconds": 5, "failureThreshold": failures}

    start, alive = probe("/healthz", 2, 60), probe("/healthz", 10, 3)
    return {"startupProbe": start, "livenessProbe": alive, "readinessProbe": probe(ready, 5, 2)}


def _ports(ports: Mapping[str, int]) -> list[Object]:
    return [{"name": name, "containerPort": port} for name, port in ports.items()]


def _variables(values: Mapping[str, str]) -> list[Object]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _from_field(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
