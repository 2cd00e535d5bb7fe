"""The Postman collection of the training API, made from its OpenAPI. `docs/generate.py` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unified_gateway.app import create_app
from unified_gateway.options import GatewayOptions
from unified_gateway.tokens import TOKEN_HEADER, Tokens

FILE = Path(__file__).parent / "postman/trainer-apis.postman_collection.json"
SCHEMA = "https://schema.getpostman.com/json/collection/v2.1.0/collection.json"
VARIABLES = {
    "trainer_base_url": "http://localhost:8000",
    "trainer_api_token": "",
    "trainer_job_name": "",
}
"""Variables of the collection. Who submits a job finds its name in the last one."""
SUBMIT = "post /train"
NAMES = {SUBMIT: "Submit Training Job", "get /train/{name}": "Get Job Status"}
"""Names that document 4 gives. Other requests have the summary of their route."""
LAST = ["delete /train/{name}"]
"""Requests that end what the others look at: the whole collection can be run from its beginning to its end."""

Json = dict[str, Any]


def collection() -> str:
    """The text of the collection: a request for each operation."""
    api = create_app(GatewayOptions(), Tokens({})).openapi()
    operations = {
        f"{method} {path}": request_item(api, method, path, operation)
        for path, methods in api["paths"].items()
        for method, operation in methods.items()
    }
    ordered = [*(name for name in operations if name not in LAST), *LAST]
    found = {
        "info": {"name": api["info"]["title"], "description": api["info"]["description"], "schema": SCHEMA},
        "item": [operations[name] for name in ordered],
        "variable": [{"key": key, "value": value} for key, value in VARIABLES.items()],
    }
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"


def request_item(api: Json, method: str, path: str, operation: Json) -> Json:
    """One request, with a script that holds its answer against the documented ones."""
    headers = [{"key": TOKEN_HEADER, "value": "{{trainer_api_token}}"}] if operation["security"] else []
    request: Json = {"method": method.upper(), "header": headers, "url": url(path, operation.get("parameters", []))}
    if "description" in operation:
        request["description"] = operation["description"]
    if "requestBody" in operation:
        headers.append({"key": "Content-Type", "value": "application/json"})
        schema = resolved(api, operation["requestBody"]["content"]["application/json"]["schema"])
        example: Json = next(iter(schema.get("examples", [])), {})
        raw = json.dumps(example, indent=2, ensure_ascii=False)
        request["body"] = {"mode": "raw", "raw": raw, "options": {"raw": {"language": "json"}}}
    script = {"type": "text/javascript", "exec": [*checks(f"{method} {path}", operation)]}
    name = NAMES.get(f"{method} {path}", operation["summary"])
    return {"name": name, "event": [{"listen": "test", "script": script}], "request": request}


def url(path: str, parameters: list[Mapping[str, Any]]) -> Json:
    """The address of a request, with the job's name from the collection's variable. Parameters of the query are there
    to be switched on."""
    parts = [part.replace("{name}", "{{trainer_job_name}}") for part in path.strip("/").split("/")]
    query = [
        {
            "key": each["name"],
            "value": str(each["schema"].get("default", "")).lower(),
            "description": each.get("description", ""),
            "disabled": True,
        }
        for each in parameters
        if each["in"] == "query"
    ]
    found: Json = {"raw": "/".join(["{{trainer_base_url}}", *parts]), "host": ["{{trainer_base_url}}"], "path": parts}
    return {**found, "query": query} if query else found


def checks(name: str, operation: Json) -> Iterator[str]:
    """The script that runs after an answer. A job that goes on cannot be resumed, and the service has to say so."""
    good = sorted(int(code) for code in operation["responses"] if code.startswith("2"))
    allowed = [*good, 409] if name.endswith("/resume") else good
    yield f'pm.test("is answered as documented", () => pm.expect(pm.response.code).to.be.oneOf({allowed}));'
    if name == SUBMIT:
        yield 'pm.collectionVariables.set("trainer_job_name", pm.response.json().name);'


def resolved(api: Json, schema: Json) -> Json:
    """A schema that may be given by a reference, or be optional."""
    if "$ref" in schema:
        found: Any = api
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        return resolved(api, found)
    options = [each for each in schema.get("anyOf", []) if each.get("type") != "null"]
    return resolved(api, options[0]) if options else schema
