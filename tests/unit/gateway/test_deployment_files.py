"""The manifests of deploy/kubernetes/kubeflow: fields, what they refer to, and the gateway's command line in them.

No API server can run here, so that they are held against the models of the Kubernetes client, and against each other.
"""

from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.support.kubernetes_models import faults_of
from unified_gateway.cli import build_parser
from unified_gateway.kubernetes.manifest import KubeflowOptions
from unified_gateway.tokens import TOKEN_VARIABLE

FOLDER = Path(__file__).parents[3] / "deploy/kubernetes/kubeflow"


def objects() -> dict[tuple[str, str], dict[str, Any]]:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert files == set(kustomization["resources"])
    found = [each for file in sorted(files) for each in yaml.safe_load_all((FOLDER / file).read_text())]
    assert not any("namespace" in each["metadata"] for each in found)  # the kustomization says it
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def container() -> dict[str, Any]:
    (one,) = objects()["Deployment", "unified-gateway"]["spec"]["template"]["spec"]["containers"]
    return dict(one)


def test_every_field_is_one_of_kubernetes() -> None:
    models = {
        "ServiceAccount": "V1ServiceAccount",
        "Role": "V1Role",
        "RoleBinding": "V1RoleBinding",
        "Deployment": "V1Deployment",
        "Service": "V1Service",
    }
    for (kind, name), each in objects().items():
        if kind == "Service":  # the client takes a port by name or number, and has no type for that
            each["spec"]["ports"][0].pop("targetPort")
        for probe in ("startupProbe", "livenessProbe", "readinessProbe") if kind == "Deployment" else ():
            each["spec"]["template"]["spec"]["containers"][0][probe]["httpGet"]["port"] = {}
        assert list(faults_of(each, models[kind])) == [], (kind, name)


def test_what_the_objects_refer_to_is_there() -> None:
    found = objects()
    pod = found["Deployment", "unified-gateway"]["spec"]["template"]
    assert ("ServiceAccount", pod["spec"]["serviceAccountName"]) in found
    assert found["Service", "unified-gateway"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert found["Deployment", "unified-gateway"]["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert found["Service", "unified-gateway"]["spec"]["ports"][0]["targetPort"] in ports
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container()[probe]["httpGet"] == {"path": "/healthz", "port": "http"}
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container()["volumeMounts"]} == volumes
    binding = found["RoleBinding", "unified-gateway"]
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) in found
    assert all((subject["kind"], subject["name"]) in found for subject in binding["subjects"])


def test_the_role_has_the_verbs_of_the_document_and_what_logs_and_events_need() -> None:
    verbs = {
        resource: set(rule["verbs"])
        for rule in objects()["Role", "unified-gateway"]["rules"]
        for resource in rule["resources"]
    }
    assert verbs == {
        "pytorchjobs": {"get", "list", "watch", "create", "delete"},
        "pods": {"get", "list"},
        "events": {"get", "list"},
        "pods/log": {"get"},
    }


def test_the_gateway_is_started_as_it_takes_it() -> None:
    one = container()
    variables = {each["name"]: each.get("value", "training") for each in one["env"]}
    arguments = build_parser().parse_args([each.replace("$(POD_NAMESPACE)", "training") for each in one["args"]])
    assert one["command"] == ["unified-gateway"]
    assert (arguments.backend, arguments.namespace, arguments.host) == ("kubeflow", ["training"], "0.0.0.0")
    assert arguments.port == one["ports"][0]["containerPort"]
    options = KubeflowOptions.read(variables)
    assert ("ServiceAccount", options.service_account) in objects()
    assert options.image
    secret = next(each for each in one["env"] if each["name"] == TOKEN_VARIABLE)["valueFrom"]["secretKeyRef"]
    commands = (FOLDER / "kustomization.yaml").read_text()
    assert f"secret generic {secret['name']} --from-literal={secret['key']}=" in commands


def test_the_gateway_has_no_rights_that_it_does_not_need() -> None:
    pod = objects()["Deployment", "unified-gateway"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    context = container()["securityContext"]
    assert (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (False, True)
    assert context["capabilities"] == {"drop": ["ALL"]}
