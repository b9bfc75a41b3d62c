"""Put the HTTP server together: paths, error handlers and middleware. Builds no engine."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from specserve.api.access import ClientAccess
from specserve.api.body import BODY_S, BodyDecoder, BodyLimit
from specserve.api.http10 import WholeAnswer
from specserve.api.key_check import KeyCheck
from specserve.api.messages.body import MessagesError
from specserve.api.messages.errors import MessagesErrors
from specserve.api.metering import RequestMetrics
from specserve.api.middleware import (
    IGNORED,
    REQUEST_ID,
    AccessLog,
    HeadAsGet,
    HeadLimit,
    HostCheck,
    InternalErrorHandler,
    LoadLimit,
)
from specserve.api.model_directory import ModelDirectory
from specserve.api.playground.page import HOME, PARTS, REFERENCE, Page
from specserve.api.probes import Probes
from specserve.api.refusal import Refusal
from specserve.api.request_spans import RequestSpans
from specserve.api.responses import FIGURE_HEADERS
from specserve.api.routes import Endpoints
from specserve.api.schema import Error
from specserve.api.unserved import STORED_RESPONSES, TEXT_ONLY_PATHS, nothing_stored, text_only
from specserve.config.features import part
from specserve.config.sections import HttpConfig
from specserve.config.tree import Config
from specserve.errors import SpecserveError
from specserve.metrics import Registry

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

COMPLETIONS, CHAT_COMPLETIONS = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
GENERATING = (COMPLETIONS, CHAT_COMPLETIONS, RESPONSES, MESSAGES)
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_EXPOSED_HEADERS = (REQUEST_ID, IGNORED, "Retry-After", *FIGURE_HEADERS.values())


def build(
    models: ModelDirectory,
    config: Config,
    registry: Registry,
    access: ClientAccess | None,
    tracer: Tracer | None = None,
) -> FastAPI:
    """Return the HTTP server over one model or several.

    `registry` is that of this process; the models' services hand out the engines' metrics. With
    `access` it asks for keys, with `tracer` it makes spans.
    """
    metrics, page = RequestMetrics(registry, time.perf_counter), Page()
    app = FastAPI(
        title="specserve",
        version="v1",  # of the protocol, not of the package
        redirect_slashes=False,
        docs_url=None,  # the framework's pages would load scripts from elsewhere
        redoc_url=None,
        middleware=_middleware(config, metrics, page, models, access, tracer),
        exception_handlers=dict.fromkeys(
            (SpecserveError, RequestValidationError, HTTPException), _refuse
        ),
        responses={"4XX": {"model": Error}, "5XX": {"model": Error}},
    )
    app.root_path = config.http.root_path  # FastAPI will drop the parameter of that name
    endpoints = Endpoints(
        models,
        request_metrics=metrics,
        access=access,
        log_prompts=config.logs.prompts,
        unknown_parameters=config.http.unknown_parameters,
    )
    _add_routes(app, endpoints)
    _add_probe_routes(app, Probes(models, registry, access))
    if any(one.adapters.load_from is not None for one in config.each_model):
        part("adapters.loading:add_routes")(app, models)
    _add_unserved_routes(app)
    _add_page_routes(app, page)
    return app


def _add_routes(app: FastAPI, endpoints: Endpoints) -> None:
    app.post(COMPLETIONS)(endpoints.completions)
    app.post(CHAT_COMPLETIONS)(endpoints.chat_completions)
    app.post(RESPONSES)(endpoints.responses)
    refusals: dict[int | str, dict[str, Any]] = {
        status: {"model": MessagesError} for status in ("4XX", "5XX")
    }
    app.post(MESSAGES, responses=refusals)(endpoints.messages)
    app.post(f"{MESSAGES}/count_tokens", responses=refusals)(endpoints.count_tokens)
    app.get("/v1/models")(endpoints.models)
    app.get("/v1/models/{name:path}")(endpoints.model)
    app.post("/tokenize")(endpoints.tokenize)
    app.post("/detokenize")(endpoints.detokenize)


def _add_probe_routes(app: FastAPI, probes: Probes) -> None:
    app.get("/health")(probes.health)
    app.get("/ping")(probes.ping)
    app.post("/ping")(probes.ping)
    app.get("/ready")(probes.ready)
    app.get("/version")(probes.version)
    app.get("/metrics")(probes.metrics)
    app.get("/trace")(probes.trace)


def _add_unserved_routes(app: FastAPI) -> None:
    methods = ["GET", "POST", "DELETE"]
    for path in TEXT_ONLY_PATHS:
        app.api_route(path, methods=methods, include_in_schema=False)(text_only)
    app.api_route(STORED_RESPONSES, methods=methods, include_in_schema=False)(nothing_stored)


def _add_page_routes(app: FastAPI, page: Page) -> None:
    app.get(HOME, include_in_schema=False)(page.home)
    app.get(REFERENCE, include_in_schema=False)(page.reference)
    app.get(PARTS + "{name}", include_in_schema=False)(page.part)


def _middleware(
    config: Config,
    metrics: RequestMetrics,
    page: Page,
    models: ModelDirectory,
    access: ClientAccess | None,
    tracer: Tracer | None,
) -> list[Middleware]:
    """Return the middleware, outermost first.

    A refused request has an id, too, and a browser may read why it was refused.
    """
    cors, hosts = config.http.cors_origins, _hosts(config.http)
    return [
        Middleware(WholeAnswer),
        Middleware(AccessLog, metrics=metrics, trusted_proxies=config.http.trusted_proxies),
        *([Middleware(RequestSpans, tracer=tracer, paths=GENERATING)] if tracer else []),
        *([_cors(cors)] if cors else []),
        Middleware(HeadAsGet),
        Middleware(MessagesErrors, path=MESSAGES),
        Middleware(InternalErrorHandler, log_prompts=config.logs.prompts),
        Middleware(HeadLimit),
        *([Middleware(HostCheck, hosts=hosts)] if hosts else []),
        *([_key_check(access, config, page)] if access is not None else []),
        Middleware(
            LoadLimit,
            models=models,
            access=access,
            paths=GENERATING,
        ),
        Middleware(BodyLimit, limit=config.limits.max_body_bytes, seconds=BODY_S),
        Middleware(BodyDecoder, limit=config.limits.max_body_bytes),
    ]


def _cors(origins: Sequence[str]) -> Middleware:
    """Return the headers that let pages from these origins use the API."""
    return Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=_EXPOSED_HEADERS,
    )


def _hosts(http: HttpConfig) -> Collection[str]:
    """Return the hosts that requests may be addressed to; none: any."""
    is_local = http.host in LOOPBACK or f"[{http.host}]" in LOOPBACK
    return LOOPBACK if not http.hosts and is_local and http.api_keys_file is None else http.hosts


def _key_check(access: ClientAccess, config: Config, page: Page) -> Middleware:
    """Return the check of API keys. If the page is an open path, so are its parts."""
    configured = frozenset(config.http.open_paths)
    open_paths = configured | page.paths if HOME in configured else configured
    return Middleware(KeyCheck, access=access, open_paths=open_paths)


async def _refuse(request: Request, error: Exception) -> Response:
    headers = error.headers if isinstance(error, HTTPException) else None
    return Refusal.from_error(error).response(headers)
