"""The HTTP paths, one method each. Parsing, generating and rendering are done elsewhere."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Annotated

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from specserve import metrics
from specserve.api.access import ClientAccess, may_ask_full_engines
from specserve.api.choices import CHAT, COMPLETION, ResponseKind
from specserve.api.constraints import errors_as_sent
from specserve.api.generation import Generation
from specserve.api.key_file import KeyTrouble
from specserve.api.metering import RequestMetrics
from specserve.api.model_directory import ModelBackend, ModelDirectory
from specserve.api.parse import GenerationRequest
from specserve.api.request_spans import TRACE_CONTEXT
from specserve.api.response_items.answer import RESPONSE, ItemsResponse
from specserve.api.response_items.body import ResponsesBody
from specserve.api.response_items.chat_request import to_chat
from specserve.api.responses import (
    FullResponse,
    GenerationResponse,
    ResponseHead,
    StreamedResponse,
    json_response,
)
from specserve.api.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from specserve.api.service import ModelStatus, Status
from specserve.api.strict_model import Body, StrictModel, shown_names
from specserve.api.template_options import parse_template_options
from specserve.config.sections import IGNORE, REFUSE
from specserve.errors import BadRequest, BadValue, Overloaded, SpecserveError, Unavailable
from specserve.metrics import Registry, Snapshot
from specserve.wire.version import RELEASE

log = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 5.0  # an engine that does not send its status within that time is not healthy
Rounds = Annotated[
    int | None,
    Query(ge=1, le=2000, description="How many of the last rounds; left out, all that are kept."),
]
ModelName = Annotated[str | None, Query(description="One of several models.")]


class Endpoints:
    """Handlers of all paths."""

    def __init__(
        self,
        models: ModelDirectory,
        *,
        registry: Registry,
        request_metrics: RequestMetrics,
        access: ClientAccess | None = None,
        log_prompts: bool = False,
        unknown_parameters: str = REFUSE,
    ) -> None:
        self._models, self._registry, self._request_metrics = models, registry, request_metrics
        self._log_prompts, self._unknown_parameters = log_prompts, unknown_parameters
        self._access = access

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """Continue prompts."""
        start = self._request_metrics.clock()
        self._log_body(body, request)
        self._check_unknown(body, request)
        with errors_as_sent(body):
            model = self._choose(body.model, request)
            parsed = await model.parser.completion(body)
        return self._respond(COMPLETION, model, parsed, request, start)

    async def chat_completions(self, body: ChatBody, request: Request) -> Response:
        """Write the assistant's next message."""
        start = self._request_metrics.clock()
        self._log_body(body, request)
        self._check_unknown(body, request)
        with errors_as_sent(body):
            model = self._choose(body.model, request)
            parsed = await model.parser.chat(body)
        return self._respond(CHAT, model, parsed, request, start)

    async def responses(self, body: ResponsesBody, request: Request) -> Response:
        """Answer a text or a list of items with a list of items."""
        start = self._request_metrics.clock()
        self._log_body(body, request)
        self._check_unknown(body, request)
        model = self._choose(body.model, request)
        try:
            generation_request = await model.parser.chat(to_chat(body))
        except BadRequest as error:
            if getattr(error, "param", None) == "messages":
                raise type(error)(str(error), param="input") from error
            raise
        return ItemsResponse(
            self._generation(model, generation_request, request, start),
            model.tokenizer,
            generation_request,
            self._head(RESPONSE, model, request, generation_request),
            model.metrics,
            body=body,
            log_prompts=self._log_prompts,
        )

    async def models(self) -> Response:
        """Return the models that are served, each with its adapters."""
        data = [entry for model in self._models.backends for entry in model.entries()]
        return json_response({"object": "list", "data": data})

    async def model(self, name: str) -> Response:
        """Return a model that is served, or an adapter of it, by its name."""
        model = self._models.find(name)
        return json_response(model.entry(model.parser.find_adapter(name)))

    async def tokenize(self, body: TokenizeBody, request: Request) -> Response:
        """Return the ids of a prompt, or of the prompt that messages become."""
        self._check_unknown(body, request)
        model = self._models.find(body.model)
        model.parser.find_adapter(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise BadValue("give either prompt or messages", param="prompt")
        if body.messages is not None:
            options = parse_template_options(body, model.tokenizer)
            ids = await model.parser.chat_ids(body.messages, options=options)
        else:
            ids = await model.parser.text_ids(body.prompt or "", special=body.add_special_tokens)
        return json_response(
            {"tokens": ids, "count": len(ids), "max_model_len": model.served.max_context}
        )

    async def detokenize(self, body: DetokenizeBody, request: Request) -> Response:
        """Return the text of ids."""
        self._check_unknown(body, request)
        model = self._models.find(body.model)
        model.parser.find_adapter(body.model)
        return json_response({"prompt": await model.parser.decode_ids(body.tokens)})

    async def health(self, model: ModelName = None) -> Response:
        """Return 200 if the workers make progress: of one of the models at least, or of `model`."""
        status, trouble = await self._status(), self._key_trouble()
        self._require_healthy(model, status)
        if not status.healthy:
            raise Unavailable(status.why or "the workers make no progress")
        healthy: dict[str, object] = {"status": "healthy"}
        if status.draft_placements:
            healthy["draft_placement"] = "; ".join(status.draft_placements)
        if status.device_troubles:
            healthy["devices"] = "; ".join(status.device_troubles)
        if status.pools:
            healthy["draft_pools"] = {
                one.name: {
                    "devices": one.devices,
                    "engines": one.engines,
                    "busy": round(one.busy, 3),
                }
                for one in status.pools
            }
        if status.models:
            healthy["models"] = {one.name: one.why or "healthy" for one in status.models}
        return json_response(healthy | _trouble_member(trouble))

    async def ping(self) -> Response:
        """Return what `/health` returns, for hosts that probe this path."""
        return await self.health()

    async def version(self) -> Response:
        """Return the release of specserve."""
        return json_response({"version": RELEASE})

    async def ready(self, model: ModelName = None) -> Response:
        """Return 200 if requests are taken: for one of the models at least, or for `model`."""
        status, trouble = await self._status(), self._key_trouble()
        self._require_healthy(model, status)
        if not status.ready:
            raise Unavailable(status.why or "the server is starting or stopping")
        if trouble is not None and trouble.is_over_grace:
            raise Unavailable(trouble.text)
        return json_response({"status": "ready"} | _trouble_member(trouble))

    async def metrics(self) -> Response:
        """Return Prometheus text; it has no samples of an engine that does not answer."""
        status = await self._status()
        self._key_trouble()  # so that its gauge is of this moment
        # Apart, since other gateways sum up what is in this one's registry.
        snapshots = [
            self._models.snapshot(self._registry),
            *(self._replica_counts(model, status) for model in self._models.backends),
            *status.metrics,
        ]
        return Response(metrics.render(metrics.merge(snapshots)), media_type=metrics.CONTENT_TYPE)

    async def trace(self, rounds: Rounds = None, model: ModelName = None) -> Response:
        """Return the last rounds of an engine, for Perfetto: of `model`, or of the first one."""
        backend = self._models.backends[0] if model is None else self._models.find(model)
        return json_response(dict(await backend.service.trace(rounds)))

    def _choose(self, name: str | None, request: Request) -> ModelBackend:
        """Return the model that a generation names, and count it on the client's limits for it.

        Raises Overloaded if its engines are full, which the middleware asks of a single model
        before it reads the body, and RateLimited.
        """
        model, use = self._models.find(name), getattr(request.state, "key_use", None)
        if self._access is not None and use is not None:
            self._access.charge_model(use, model.served.name)
        if not self._models.has_several:
            return model
        request.state.model_metrics = model.metrics
        try:
            model.service.require_room()
        except Overloaded:
            if not may_ask_full_engines(self._access, use):
                raise
        return model

    def _require_healthy(self, name: str | None, status: Status) -> None:
        """Raise Unavailable if a probe asks for one of several models, and that is not healthy."""
        if name is None:
            return
        model = self._models.find(name).served.name
        for one in status.models:
            if one.name == model and not one.healthy:
                raise Unavailable(f"{model}: {one.why}")

    def _replica_counts(self, model: ModelBackend, status: Status) -> Snapshot:
        """Return the numbers of a model's engines, which the gateway knows from the board."""
        name = model.served.name if self._models.has_several else ""
        every = ModelStatus("", status.healthy, replicas=status.replicas)
        found = next((one for one in status.models if one.name == name), every)
        counts = {"replicas": found.replicas, "min_replicas": model.config.replicas.min}
        engines = Snapshot({name: {(): (float(count), 1.0)} for name, count in counts.items()})
        return engines.of_model(name)

    def _respond(
        self,
        kind: ResponseKind,
        model: ModelBackend,
        generation_request: GenerationRequest,
        request: Request,
        start: float,
    ) -> GenerationResponse:
        generation = self._generation(model, generation_request, request, start)
        head = self._head(kind, model, request, generation_request)
        if not generation_request.stream:
            return FullResponse(
                generation, model.tokenizer, generation_request, head, model.metrics
            )
        origins = request.headers.get("x-specserve-origins") == "1"
        return StreamedResponse(
            generation,
            model.tokenizer,
            generation_request,
            head,
            model.metrics,
            origins=origins,
            log_prompts=self._log_prompts,
        )

    def _head(
        self,
        kind: ResponseKind,
        model: ModelBackend,
        request: Request,
        generation_request: GenerationRequest,
    ) -> ResponseHead:
        """Return the head of an answer; the client may have chosen its id."""
        given = generation_request.request_id or request.state.request_id
        name = model.adapters.model_name(generation_request.adapter)
        return ResponseHead(kind, given, int(time.time()), name)

    def _generation(
        self,
        model: ModelBackend,
        generation_request: GenerationRequest,
        request: Request,
        start: float,
    ) -> Generation:
        return Generation(
            model.service,
            model.tokenizer,
            generation_request,
            timeout_s=model.config.limits.request_timeout_s,
            metrics=model.metrics,
            start=start,
            key_use=getattr(request.state, "key_use", None),
            trace_context=getattr(request.state, TRACE_CONTEXT, ()),
            shares_cache=model.config.cache.shared,
        )

    def _log_body(self, body: StrictModel, request: Request) -> None:
        """Log the body, if `logs.prompts` allows it."""
        if self._log_prompts:
            request_id, body_json = (
                request.state.request_id,
                json.dumps(body.model_dump(exclude_none=True)),
            )
            log.info("%s asks %s", request_id, body_json, extra={"request_id": request_id})

    def _check_unknown(self, body: Body, request: Request) -> None:
        """Refuse, report or drop parameters that nothing knows, as `http.unknown_parameters` says.

        Reported ones are named in the log and in the response's headers.
        """
        if not body.unknown or self._unknown_parameters == IGNORE:
            return
        if self._unknown_parameters == REFUSE:
            raise body.unknown_error(body.unknown[0])
        request_id, names = request.state.request_id, shown_names(body.unknown)
        request.state.ignored = names
        log.warning(
            "%s: unknown parameters are ignored: %s",
            request_id,
            names,
            extra={"request_id": request_id},
        )

    def _key_trouble(self) -> KeyTrouble | None:
        return None if self._access is None else self._access.trouble()

    async def _status(self) -> Status:
        """Return the engines' status. An error says that they are not healthy; it is not raised."""
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                return await self._models.backends[0].service.status()
        except TimeoutError:
            return Status(
                ready=False,
                healthy=False,
                why=f"the engine did not answer within {STATUS_TIMEOUT_S:g} s",
            )
        except SpecserveError as error:
            return Status(ready=False, healthy=False, why=str(error))


def _trouble_member(trouble: KeyTrouble | None) -> dict[str, object]:
    return {} if trouble is None else {"trouble": trouble.text}
