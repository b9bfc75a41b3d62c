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
from specserve.api.access import ClientAccess
from specserve.api.adapters import AdapterRegistry
from specserve.api.choices import CHAT, COMPLETION, ResponseKind
from specserve.api.constraints import errors_as_sent
from specserve.api.generation import Generation
from specserve.api.key_file import KeyTrouble
from specserve.api.metering import RequestMetrics
from specserve.api.parse import GenerationRequest, RequestParser
from specserve.api.response_items.answer import RESPONSE, ItemsResponse
from specserve.api.response_items.body import ResponsesBody, to_chat
from specserve.api.responses import (
    FullResponse,
    GenerationResponse,
    ResponseHead,
    StreamedResponse,
    json_response,
)
from specserve.api.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from specserve.api.service import ServedModel, Service, Status
from specserve.api.strict_model import Body, StrictModel, shown_names
from specserve.api.template_options import parse_template_options
from specserve.api.tokenizer import Tokenizer
from specserve.config.tree import IGNORE, REFUSE
from specserve.errors import BadRequest, BadValue, SpecserveError, Unavailable
from specserve.metrics import Registry, Snapshot
from specserve.types import Adapter
from specserve.wire.version import RELEASE

log = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 5.0  # an engine that does not send its status within that time is not healthy
Rounds = Annotated[
    int | None,
    Query(ge=1, le=2000, description="How many of the last rounds; left out, all that are kept."),
]


class Endpoints:
    """Handlers of all paths."""

    def __init__(
        self,
        service: Service,
        tokenizer: Tokenizer,
        served: ServedModel,
        *,
        registry: Registry,
        request_metrics: RequestMetrics,
        timeout_s: float,
        access: ClientAccess | None = None,
        adapters: AdapterRegistry | None = None,
        log_prompts: bool = False,
        shares_cache: bool = False,
        min_replicas: int = 1,
        unknown_parameters: str = REFUSE,
    ) -> None:
        self._service, self._tokenizer, self._served = service, tokenizer, served
        self._registry, self._request_metrics = registry, request_metrics
        self._timeout_s, self._log_prompts = timeout_s, log_prompts
        self._shares_cache, self._min_replicas = shares_cache, min_replicas
        self._unknown_parameters = unknown_parameters
        self._access, self._adapters = access, adapters or AdapterRegistry(served.name)
        self._parser = RequestParser(tokenizer, served, self._adapters)

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """Continue prompts."""
        start = self._request_metrics.clock()
        self._log_body(body, request)
        self._check_unknown(body, request)
        with errors_as_sent(body):
            parsed = await self._parser.completion(body)
        return self._respond(COMPLETION, parsed, request, start)

    async def chat_completions(self, body: ChatBody, request: Request) -> Response:
        """Write the assistant's next message."""
        start = self._request_metrics.clock()
        self._log_body(body, request)
        self._check_unknown(body, request)
        with errors_as_sent(body):
            parsed = await self._parser.chat(body)
        return self._respond(CHAT, parsed, request, start)

    async def responses(self, body: ResponsesBody, request: Request) -> Response:
        """Answer a text or a list of items with a list of items."""
        start = self._request_metrics.clock()
        self._log_body(body, request)
        self._check_unknown(body, request)
        try:
            generation_request = await self._parser.chat(to_chat(body))
        except BadRequest as error:
            if getattr(error, "param", None) == "messages":
                raise type(error)(str(error), param="input") from error
            raise
        return ItemsResponse(
            self._generation(generation_request, request, start),
            self._tokenizer,
            generation_request,
            self._head(RESPONSE, request, generation_request),
            self._request_metrics,
            body=body,
            log_prompts=self._log_prompts,
        )

    async def models(self) -> Response:
        """Return the model that is served, and its adapters."""
        served = [None, *map(self._adapters.find, self._adapters.names)]
        return json_response({"object": "list", "data": [self.model_entry(one) for one in served]})

    async def model(self, name: str) -> Response:
        """Return the model that is served, or an adapter of it, by its name."""
        return json_response(self.model_entry(self._parser.find_adapter(name)))

    async def tokenize(self, body: TokenizeBody, request: Request) -> Response:
        """Return the ids of a prompt, or of the prompt that messages become."""
        self._check_unknown(body, request)
        self._parser.find_adapter(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise BadValue("give either prompt or messages", param="prompt")
        if body.messages is not None:
            options = parse_template_options(body, self._tokenizer)
            ids = await self._parser.chat_ids(body.messages, options=options)
        else:
            ids = await self._parser.text_ids(body.prompt or "", special=body.add_special_tokens)
        return json_response(
            {"tokens": ids, "count": len(ids), "max_model_len": self._served.max_context}
        )

    async def detokenize(self, body: DetokenizeBody, request: Request) -> Response:
        """Return the text of ids."""
        self._check_unknown(body, request)
        self._parser.find_adapter(body.model)
        return json_response({"prompt": await self._parser.decode_ids(body.tokens)})

    async def health(self) -> Response:
        """Return 200 if the workers make progress."""
        status, trouble = await self._status(), self._key_trouble()
        if not status.healthy:
            raise Unavailable(status.why or "the workers make no progress")
        healthy: dict[str, object] = {"status": "healthy"}
        if status.draft_placements:
            healthy["draft_placement"] = "; ".join(status.draft_placements)
        if status.device_troubles:
            healthy["devices"] = "; ".join(status.device_troubles)
        return json_response(healthy | _trouble_member(trouble))

    async def ping(self) -> Response:
        """Return what `/health` returns, for hosts that probe this path."""
        return await self.health()

    async def version(self) -> Response:
        """Return the release of specserve."""
        return json_response({"version": RELEASE})

    async def ready(self) -> Response:
        """Return 200 if requests are taken."""
        status, trouble = await self._status(), self._key_trouble()
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
        counts = {"replicas": status.replicas, "min_replicas": self._min_replicas}
        engines = Snapshot({name: {(): (float(count), 1.0)} for name, count in counts.items()})
        snapshots = [self._registry.snapshot(), engines, *status.metrics]
        return Response(metrics.render(metrics.merge(snapshots)), media_type=metrics.CONTENT_TYPE)

    async def trace(self, rounds: Rounds = None) -> Response:
        """Return the last rounds, for Perfetto."""
        return json_response(dict(await self._service.trace(rounds)))

    def _respond(
        self,
        kind: ResponseKind,
        generation_request: GenerationRequest,
        request: Request,
        start: float,
    ) -> GenerationResponse:
        generation = self._generation(generation_request, request, start)
        head = self._head(kind, request, generation_request)
        if not generation_request.stream:
            return FullResponse(
                generation, self._tokenizer, generation_request, head, self._request_metrics
            )
        origins = request.headers.get("x-specserve-origins") == "1"
        return StreamedResponse(
            generation,
            self._tokenizer,
            generation_request,
            head,
            self._request_metrics,
            origins=origins,
            log_prompts=self._log_prompts,
        )

    def _head(
        self, kind: ResponseKind, request: Request, generation_request: GenerationRequest
    ) -> ResponseHead:
        """Return the head of an answer; the client may have chosen its id."""
        given = generation_request.request_id or request.state.request_id
        model = self._adapters.model_name(generation_request.adapter)
        return ResponseHead(kind, given, int(time.time()), model)

    def _generation(
        self, generation_request: GenerationRequest, request: Request, start: float
    ) -> Generation:
        return Generation(
            self._service,
            self._tokenizer,
            generation_request,
            timeout_s=self._timeout_s,
            metrics=self._request_metrics,
            start=start,
            key_use=getattr(request.state, "key_use", None),
            shares_cache=self._shares_cache,
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

    def model_entry(self, adapter: Adapter | None) -> dict[str, object]:
        """Return what `/v1/models` says of the target, or of an adapter of it."""
        served = self._served
        parent = {} if adapter is None else {"parent": served.name}
        return {
            "id": self._adapters.model_name(adapter),
            "object": "model",
            "created": served.created,
            "owned_by": "specserve",
            "max_model_len": served.max_context,
        } | (parent if served.note is None else {**parent, "note": served.note})

    def _key_trouble(self) -> KeyTrouble | None:
        return None if self._access is None else self._access.trouble()

    async def _status(self) -> Status:
        """Return the engines' status. An error says that they are not healthy; it is not raised."""
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                return await self._service.status()
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
