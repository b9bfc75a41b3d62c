"""The HTTP paths of clients, one method each: they generate, name models and count tokens.

Parsing, generating and rendering are done elsewhere.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from specserve.api.access import ClientAccess, may_ask_full_engines
from specserve.api.chat_schema import ChatBody, TokenizeBody
from specserve.api.choices import CHAT, COMPLETION, ResponseKind
from specserve.api.constraints import errors_as_sent
from specserve.api.generation import Generation
from specserve.api.generation_request import GenerationRequest
from specserve.api.messages.answer import MESSAGE, MessageResponse
from specserve.api.messages.body import CountTokensBody, MessagesBody
from specserve.api.messages.chat_request import ignored_names
from specserve.api.messages.chat_request import to_chat as messages_to_chat
from specserve.api.metering import RequestMetrics
from specserve.api.model_directory import ModelBackend, ModelDirectory
from specserve.api.request_spans import TRACE_CONTEXT
from specserve.api.response_items.answer import RESPONSE, ItemsResponse
from specserve.api.response_items.body import ResponsesBody
from specserve.api.response_items.chat_request import to_chat
from specserve.api.responses import FullResponse, GenerationResponse, ResponseHead, json_response
from specserve.api.schema import CompletionBody, DetokenizeBody
from specserve.api.streamed_response import StreamedResponse
from specserve.api.strict_model import Body, StrictModel, shown_names
from specserve.api.template_options import parse_template_options, unread_variables
from specserve.api.tools.offer import parse_offer
from specserve.config.sections import IGNORE, REFUSE
from specserve.errors import BadRequest, BadValue, Overloaded

log = logging.getLogger(__name__)


class Endpoints:
    """Handlers of the paths that clients use."""

    def __init__(
        self,
        models: ModelDirectory,
        *,
        request_metrics: RequestMetrics,
        access: ClientAccess | None = None,
        log_prompts: bool = False,
        unknown_parameters: str = REFUSE,
    ) -> None:
        self._models, self._request_metrics = models, request_metrics
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
        self._note_ignored(unread_variables(body, model.tokenizer), request)
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

    async def messages(self, body: MessagesBody, request: Request) -> Response:
        """Write the assistant's next message, for clients of Anthropic's API."""
        start = self._request_metrics.clock()
        self._log_body(body, request)
        self._check_unknown(body, request)
        model = self._choose(body.model, request)
        chat = self._chat_of(body, model, request)
        with errors_as_sent(chat):
            generation_request = await model.parser.chat(chat)
        return MessageResponse(
            self._generation(model, generation_request, request, start),
            model.tokenizer,
            generation_request,
            self._head(MESSAGE, model, request, generation_request),
            model.metrics,
            log_prompts=self._log_prompts,
        )

    async def count_tokens(self, body: CountTokensBody, request: Request) -> Response:
        """Return how many tokens the prompt of a message has."""
        self._check_unknown(body, request)
        model = self._models.find(body.model)
        model.parser.find_adapter(body.model)
        chat = self._chat_of(body, model, request)
        options = parse_template_options(chat, model.tokenizer)
        with errors_as_sent(chat):
            ids = await model.parser.chat_ids(chat.messages, parse_offer(chat), options)
        return json_response({"input_tokens": len(ids)})

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
            self._note_ignored(unread_variables(body, model.tokenizer), request)
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

    def _chat_of(self, body: CountTokensBody, model: ModelBackend, request: Request) -> ChatBody:
        has_reasoning = model.parser.has_reasoning
        variables = model.tokenizer.template_variables
        chat = messages_to_chat(body, has_reasoning=has_reasoning, template_variables=variables)
        ignored = ignored_names(body, has_reasoning=has_reasoning, template_variables=variables)
        self._note_ignored(ignored, request)
        return chat

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
        self._note_ignored(body.unknown, request)

    def _note_ignored(self, names: Sequence[str], request: Request) -> None:
        """Name what was ignored in the log and in the response's headers."""
        if not names:
            return
        noted = [*getattr(request.state, "ignored", ()), *names]
        request.state.ignored = noted
        request_id = request.state.request_id
        log.warning(
            "%s: unknown parameters are ignored: %s",
            request_id,
            shown_names(noted),
            extra={"request_id": request_id},
        )
