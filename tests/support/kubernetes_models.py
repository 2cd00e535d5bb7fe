"""Check of an object against the models of the Kubernetes and Kubeflow SDKs: fields, their types, and what is required.

These are models of clients, not the schema of the API server: they have no enums, defaults or admission.
"""

import re
from collections.abc import Iterator
from typing import Any

PLAIN: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "float": (int, float),
    "bool": bool,
    "datetime": str,
    "object": object,
}


def faults_of(value: Any, model: str, path: str = "") -> Iterator[str]:
    """Yield what is wrong with a JSON value that shall be of this type of `openapi_types`."""
    if inner := re.fullmatch(r"list\[(.*)\]", model):
        if not isinstance(value, list):
            yield f"{path}: {value!r} is no list"
            return
        for index, each in enumerate(value):
            yield from faults_of(each, inner[1], f"{path}[{index}]")
    elif inner := re.fullmatch(r"dict\(str, (.*)\)", model):
        if not isinstance(value, dict):
            yield f"{path}: {value!r} is no mapping"
            return
        for key, each in value.items():
            yield from faults_of(each, inner[1], f"{path}.{key}")
    elif model in PLAIN:
        if not isinstance(value, PLAIN[model]) or (model == "int" and isinstance(value, bool)):
            yield f"{path}: {value!r} is no {model}"
    elif not isinstance(value, dict):
        yield f"{path}: {value!r} is no {model}"
    else:
        yield from _faults_of_object(value, model, path)


def _faults_of_object(value: dict[str, Any], model: str, path: str) -> Iterator[str]:
    # Here, as their hundreds of models take half a second, in each process that collects this test.
    import kubeflow.training.models
    import kubernetes.client

    module = kubeflow.training.models if hasattr(kubeflow.training.models, model) else kubernetes.client
    kind = getattr(module, model)
    names = {alias: name for name, alias in kind.attribute_map.items()}
    for key, each in value.items():
        if key not in names:
            yield f"{path}: {model} has no field {key!r}"
        else:
            yield from faults_of(each, kind.openapi_types[names[key]], f"{path}.{key}")
    try:
        kind(**{names[key]: each for key, each in value.items() if key in names})
    except ValueError as error:
        yield f"{path}: {error}"
