"""Puts the HTTP server together: paths, error answers, and what every request passes through. Builds no engine."""

from __future__ import annotations

import time
from pathlib import Path

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from specserve.api.keys import KeyFile
from specserve.api.metering import Meter
from specserve.api.middleware import REQUEST_ID, BodyLimit, HeadLimit, Journal, KeyCheck, LastResort
from specserve.api.playground.page import HOME, PARTS, Page
from specserve.api.rates import Accounts
from specserve.api.refusal import Refusal
from specserve.api.routes import Endpoints
from specserve.api.schema import Error
from specserve.api.service import Served, Service
from specserve.api.tokenizer import Text
from specserve.config.tree import Config
from specserve.errors import SpecserveError
from specserve.metrics import Registry


def build(
    service: Service, text: Text, served: Served, config: Config, registry: Registry
) -> FastAPI:
    """The server over a service. `registry` is this process's own; the engine's snapshots come through the service."""
    meter, page = Meter(registry, time.perf_counter), Page()
    app = FastAPI(
        title="specserve",
        version="v1",  # of the protocol, not of the package
        redirect_slashes=False,
        docs_url=None,  # both pages would load scripts from elsewhere
        redoc_url=None,
        middleware=_middleware(config, meter, page),
        exception_handlers=dict.fromkeys(
            (SpecserveError, RequestValidationError, HTTPException), _refuse
        ),
        responses={"4XX": {"model": Error}, "5XX": {"model": Error}},
    )
    app.root_path = config.http.root_path  # the parameter of that name is on its way out
    limits, quote = config.limits, config.logs.prompts
    _route(
        app,
        Endpoints(
            service,
            text,
            served,
            registry=registry,
            meter=meter,
            timeout_s=limits.request_timeout_s,
            quote=quote,
        ),
    )
    app.get(HOME, include_in_schema=False)(page.home)
    app.get(PARTS + "{name}", include_in_schema=False)(page.part)
    return app


def _route(app: FastAPI, endpoints: Endpoints) -> None:
    app.post("/v1/completions")(endpoints.completions)
    app.post("/v1/chat/completions")(endpoints.chat_completions)
    app.get("/v1/models")(endpoints.models)
    app.get("/v1/models/{name:path}")(endpoints.model)
    app.post("/tokenize")(endpoints.tokenize)
    app.post("/detokenize")(endpoints.detokenize)
    app.get("/health")(endpoints.health)
    app.get("/ready")(endpoints.ready)
    app.get("/metrics")(endpoints.metrics)
    app.get("/trace")(endpoints.trace)


def _middleware(config: Config, meter: Meter, page: Page) -> list[Middleware]:
    """From the outside in: even what is refused has an id, and a browser may read why."""
    cors, keys_file = config.http.cors_origins, config.http.api_keys_file
    return [
        Middleware(Journal, meter=meter),
        *(
            [
                Middleware(
                    CORSMiddleware,
                    allow_origins=cors,
                    allow_methods=["GET", "POST"],
                    allow_headers=["*"],
                    expose_headers=_EXPOSED,
                )
            ]
            if cors
            else []
        ),
        Middleware(LastResort, quote=config.logs.prompts),
        Middleware(HeadLimit),
        *([_key_check(Path(keys_file), config, meter, page)] if keys_file else []),
        Middleware(BodyLimit, limit=config.limits.max_body_bytes),
    ]


def _key_check(file: Path, config: Config, meter: Meter, page: Page) -> Middleware:
    """Where the first page is open, its parts are."""
    configured = frozenset(config.http.open_paths)
    open_paths = configured | page.paths if HOME in configured else configured
    return Middleware(
        KeyCheck,
        keys=KeyFile(file),
        accounts=Accounts(time.monotonic, meter.limited),
        open_paths=open_paths,
    )


_EXPOSED = (REQUEST_ID, "Retry-After")


async def _refuse(request: Request, error: Exception) -> Response:
    headers = error.headers if isinstance(error, HTTPException) else None
    return Refusal.of(error).response(headers)
