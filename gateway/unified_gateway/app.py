"""The application object: ``uvicorn unified_gateway.app:app``, with its options from the environment."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse

from unified import errors
from unified_gateway.backend import TrainingBackend
from unified_gateway.http.admission import OPEN_PATHS, HttpAdmission
from unified_gateway.http.limits import RateLimits
from unified_gateway.options import GatewayOptions, release
from unified_gateway.page.app import PageDispatcher
from unified_gateway.page.guard import PageOptions
from unified_gateway.page.routes import router
from unified_gateway.routes import open_routes, routes
from unified_gateway.runs import RunConflictError
from unified_gateway.schemas import ResumeRequest, TrainingRequest
from unified_gateway.service import Gateway, status_of
from unified_gateway.tokens import TOKEN_HEADER, Tokens

DESCRIPTION = "Training runs on a cluster: submitted, watched, stopped and resumed, from a store to a store."
STATUS_OF_CODE = {
    "not-found": 404,
    "name-taken": 409,
    "conflict": 409,
    "ended": 409,
    "does-not-fit": 409,
    "bad-request": 422,
}
"""HTTP status of the cluster's refusals, by code. All other codes concern the cluster itself: 503."""
BURST = 10.0
_log = logging.getLogger("unified.gateway")


def create_app(
    options: GatewayOptions, tokens: Tokens, backend: TrainingBackend | None = None, page: PageOptions | None = None
) -> FastAPI:
    """Return the application of one gateway. It opens the gateway when it starts, and closes it when it ends.

    Args:
        backend: runs the jobs; None: the backend that the options name.
        page: options of the page; None: no page is served.
    """
    gateway = Gateway(options, tokens, backend, page)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.open()
        try:
            yield
        finally:
            await gateway.close()

    app = FastAPI(title="Unified training API", description=DESCRIPTION, version=release(), lifespan=lifespan)
    app.state.gateway = gateway
    app.include_router(open_routes)
    app.include_router(routes)
    limits = RateLimits(
        writes=(options.writes_per_s, BURST * options.writes_per_s),
        reads=(options.reads_per_s, BURST * options.reads_per_s),
    )
    app.add_middleware(HttpAdmission, tokens=tokens, limits=limits, telemetry=gateway.telemetry)
    if gateway.page is not None:  # outermost: admission knows no cookies
        app.add_middleware(PageDispatcher, page=gateway.page, routes=router)
    app.add_exception_handler(RequestValidationError, _answer_validation)
    app.add_exception_handler(errors.UnifiedError, _answer_error)
    app.add_exception_handler(Exception, _answer_defect)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def __getattr__(name: str) -> Any:
    """Create `app` at its first use, so that importing `create_app` reads no environment."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    options = GatewayOptions.from_environment()
    app = globals()["app"] = create_app(options, Tokens.load(options.token_file))
    return app


async def _answer_error(_: Request, error: Exception) -> JSONResponse:
    status = _status_of(error)
    body: dict[str, Any] = {"detail": str(error)}
    if isinstance(error, RunConflictError):
        body["run"] = status_of(error.run).model_dump(mode="json")
        body["differences"] = {name: found._asdict() for name, found in error.differences.items()}
    if status >= 500:
        _log.warning("event=request-failed status=%d reason=%r", status, str(error))
    return JSONResponse(body, status, headers={"retry-after": "1"} if status == 503 else None)


def _status_of(error: Exception) -> int:
    if isinstance(error, errors.RefusedError):
        return STATUS_OF_CODE.get(error.code, 503)
    if isinstance(error, errors.MasterUnreachableError | errors.StorageUnavailableError):
        return 503
    if isinstance(error, errors.StorageError):  # the run's store refused: its bucket, or its credentials
        return 424
    if isinstance(error, errors.ProtocolError):
        return 502
    return 422 if isinstance(error, errors.UsageError) else 500


async def _answer_validation(request: Request, error: Exception) -> JSONResponse:
    """Answer with the fields that are wrong. It does not repeat the values: they may be secrets."""
    assert isinstance(error, RequestValidationError)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method == "POST" and kind not in ("", "application/json") and not kind.endswith("+json"):
        return JSONResponse({"detail": f"the body is {kind}: send JSON, with content-type: application/json."}, 415)
    return JSONResponse({"detail": [_field_error(each) for each in error.errors()]}, 422)


def _field_error(error: Mapping[str, Any]) -> dict[str, Any]:
    location = [part if isinstance(part, int) else ascii(part)[1:-1] for part in error["loc"]]
    text = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        known = [*TrainingRequest.model_fields, *ResumeRequest.model_fields]
        text = f"there is no field {location[-1]!r}.{errors.nearest(str(location[-1]), known)}"
    return {"loc": location, "msg": text, "type": error["type"]}


async def _answer_defect(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse(
        {"detail": f"a defect of the gateway ({type(error).__name__}); its log has the traceback."}, 500
    )


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return the description of all routes, with the token that they need."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schemes = schema.setdefault("components", {}).setdefault("securitySchemes", {})
        schemes["token"] = {"type": "apiKey", "in": "header", "name": TOKEN_HEADER}
        for path, methods in schema["paths"].items():
            for method in methods.values():
                method["security"] = [] if path in OPEN_PATHS else [{"token": []}]
        app.openapi_schema = json.loads(json.dumps(schema))
    return app.openapi_schema
