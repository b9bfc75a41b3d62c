"""One method for each path. Knows what is answered; how it is put is said elsewhere."""

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
from specserve.api.choices import CHAT, COMPLETION, Form
from specserve.api.generation import Run
from specserve.api.metering import Meter
from specserve.api.parse import Asked, Reader
from specserve.api.responses import Answer, Head, Streamed, Whole
from specserve.api.schema import ChatBody, CompletionBody, DetokenizeBody, Shape, TokenizeBody
from specserve.api.service import Served, Service, Status
from specserve.api.tokenizer import Text
from specserve.api.wording import respond
from specserve.errors import BadValue, SpecserveError, Unavailable
from specserve.metrics import Registry, Snapshot

log = logging.getLogger(__name__)

STATUS_S = 5.0  # an engine that does not say how it is within that time is not well
Rounds = Annotated[
    int | None,
    Query(ge=1, le=2000, description="So many of the last rounds; left out, all that are kept."),
]


class Endpoints:
    """Everything that the server answers."""

    def __init__(
        self,
        service: Service,
        text: Text,
        served: Served,
        *,
        registry: Registry,
        meter: Meter,
        timeout_s: float,
        quote: bool = False,
    ) -> None:
        self._service, self._text, self._served = service, text, served
        self._registry, self._meter, self._timeout_s, self._quote = (
            registry,
            meter,
            timeout_s,
            quote,
        )
        self._reader = Reader(text, served)

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """Continues prompts."""
        begun = self._meter.clock()
        self._log(body, request)
        return self._answer(COMPLETION, await self._reader.completion(body), request, begun)

    async def chat_completions(self, body: ChatBody, request: Request) -> Response:
        """Writes the assistant's next message."""
        begun = self._meter.clock()
        self._log(body, request)
        return self._answer(CHAT, await self._reader.chat(body), request, begun)

    async def models(self) -> Response:
        """The model that is served, as a list of one."""
        return respond({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        """The same by its name."""
        self._reader.check_model(name)
        return respond(self._model())

    async def tokenize(self, body: TokenizeBody) -> Response:
        """The ids of a prompt, or of the prompt that messages become."""
        self._reader.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise BadValue("give either prompt or messages", param="prompt")
        if body.messages is not None:
            ids = await self._reader.chat_ids(body.messages)
        else:
            ids = await self._reader.text_ids(body.prompt or "", special=body.add_special_tokens)
        return respond(
            {"tokens": ids, "count": len(ids), "max_model_len": self._served.max_context}
        )

    async def detokenize(self, body: DetokenizeBody) -> Response:
        """The text of ids."""
        self._reader.check_model(body.model)
        return respond({"prompt": await self._reader.text_of(body.tokens)})

    async def health(self) -> Response:
        """200 only if the workers make progress."""
        status = await self._status()
        if not status.healthy:
            raise Unavailable(status.why or "the workers make no progress")
        return respond({"status": "healthy"})

    async def ready(self) -> Response:
        """200 once requests are taken."""
        status = await self._status()
        if not status.ready:
            raise Unavailable(status.why or "the server is starting or stopping")
        return respond({"status": "ready"})

    async def metrics(self) -> Response:
        """Prometheus text. An engine that does not answer has no samples in it."""
        status = await self._status()
        self._registry.gauge("replicas").set(status.replicas)
        snapshots: list[Snapshot] = [self._registry.snapshot(), *status.metrics]
        return Response(metrics.render(metrics.merge(snapshots)), media_type=metrics.CONTENT_TYPE)

    async def trace(self, rounds: Rounds = None) -> Response:
        """The last rounds, for Perfetto."""
        return respond(dict(await self._service.trace(rounds)))

    def _answer(self, form: Form, asked: Asked, request: Request, begun: float) -> Answer:
        account = getattr(request.state, "account", None)
        run = Run(
            self._service,
            self._text,
            asked,
            timeout_s=self._timeout_s,
            meter=self._meter,
            begun=begun,
            account=account,
        )
        head = Head(form, request.state.request_id, int(time.time()), self._served.name)
        if not asked.stream:
            return Whole(run, self._text, asked, head, self._meter)
        origins = request.headers.get("x-specserve-origins") == "1"
        return Streamed(
            run, self._text, asked, head, self._meter, origins=origins, quote=self._quote
        )

    def _log(self, body: Shape, request: Request) -> None:
        """What is asked, where that is wanted."""
        if self._quote:
            request_id, asked = (
                request.state.request_id,
                json.dumps(body.model_dump(exclude_none=True)),
            )
            log.info("%s asks %s", request_id, asked, extra={"request_id": request_id})

    def _model(self) -> dict[str, object]:
        served = self._served
        return {
            "id": served.name,
            "object": "model",
            "created": served.created,
            "owned_by": "specserve",
            "max_model_len": served.max_context,
        }

    async def _status(self) -> Status:
        """Whatever goes wrong here is news of the engine's health, and no failure of the request."""
        try:
            async with asyncio.timeout(STATUS_S):
                return await self._service.status()
        except TimeoutError:
            return Status(
                ready=False, healthy=False, why=f"the engine did not answer within {STATUS_S:g} s"
            )
        except SpecserveError as error:
            return Status(ready=False, healthy=False, why=str(error))
