"""specserve as an engine of Ray Serve LLM: `LLMConfig(server_cls=...SpecserveServer)`.

A replica is an engine with its workers, as in our own application, and our HTTP server in the same
process. Ray's router, or its proxy with direct streaming, is in front of it. Knows Ray Serve LLM
by its protocol only: what it takes and gives are that package's own classes.
"""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import ray
from ray import serve
from ray.util import get_current_placement_group

from specserve.api.access import ClientAccess
from specserve.api.app import CHAT_COMPLETIONS, COMPLETIONS, build
from specserve.api.in_process import Answer, post
from specserve.api.model_directory import ModelBackend, ModelDirectory
from specserve.api.service import ServedModel, Status
from specserve.api.tokenizer import Tokenizer
from specserve.cluster.app import engine_options
from specserve.cluster.engine.long_lived import freeze_objects
from specserve.cluster.engine.running_engine import RunningEngine
from specserve.cluster.logs import join_serve
from specserve.cluster.placement import bundles, with_drafts_that_fit
from specserve.config.checks import require_no_pool
from specserve.config.tree import Config, config_from_keys
from specserve.errors import ConfigError, SpecserveError, WorkerLost
from specserve.metrics import Registry
from specserve.tracing import tracer_from_environment
from specserve.types import Chunk, FinishReason, Request

DEMO = "demo"
ACCELERATOR = "ray.io/accelerator-type"
NOT_OURS = {
    "placement_group_config": "target.* and draft.* in engine_kwargs say what a replica needs",
    "lora_config": "name adapters in engine_kwargs, as adapters.paths",
}
"""Keys of an LLMConfig that would do nothing, and what takes their place."""
ANY_HOST = "0.0.0.0"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"


def config_of(llm_config: Any) -> Config:
    """Return our config: `engine_kwargs` has our keys, and the model is Ray Serve LLM's.

    Raises ConfigError for keys that are not ours, and for parts of an LLMConfig that would do
    nothing.
    """
    for key, instead in NOT_OURS.items():
        if getattr(llm_config, key, None):
            raise ConfigError(f"{key} does nothing here: {instead}")
    kwargs = llm_config.engine_kwargs
    if any(key.partition(".")[0] == "replicas" for key in kwargs):
        raise ConfigError("replicas does nothing here: deployment_config says how many there are")
    loading = llm_config.model_loading_config
    source = loading.model_source or loading.model_id
    if not isinstance(source, str):
        raise ConfigError("model_source is a folder or a model of the hub here, not a mirror")
    # Ray listens, and knows under which names.
    defaults: dict[str, object] = {"http.host": ANY_HOST}
    if source != DEMO:
        defaults["target.path"] = source
    if llm_config.accelerator_type is not None:
        defaults["target.label_selector"] = {ACCELERATOR: str(llm_config.accelerator_type)}
    config = config_from_keys(defaults, {**kwargs, "model": loading.model_id})
    require_no_pool(config, "Ray Serve LLM runs this one")
    return config


class LocalService:
    """The engine of this process as the HTTP server sees it."""

    def __init__(self) -> None:
        self._running: RunningEngine
        self._readers: dict[int, asyncio.Queue[Chunk | SpecserveError]] = {}

    def attach(self, running: RunningEngine) -> None:
        self._running = running

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        seq_id = self._running.submit(request)
        reader = self._readers[seq_id] = asyncio.Queue()
        try:
            while True:
                chunk = await reader.get()
                if isinstance(chunk, SpecserveError):
                    raise chunk
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            if self._readers.pop(seq_id, None) is not None:  # its last chunk has not come
                self._running.coordinator.cancel(seq_id)

    def require_room(self) -> None:
        """Refuse nothing: the coordinator itself refuses what it cannot take."""

    async def status(self) -> Status:
        health, group = self._running.health, self._running.group
        trouble = health.trouble
        return Status(
            ready=trouble is None,
            healthy=trouble is None,
            why=trouble or "",
            replicas=1,
            troubles=() if trouble is None else (trouble,),
            device_troubles=health.device_troubles,
            losses=group.losses,
            draft_placements=() if group.draft_placement is None else (group.draft_placement,),
            irreproducible=() if (reason := group.info.irreproducible) is None else (reason,),
            metrics=(self._running.snapshot(),),
        )

    async def trace(self, last: int | None = None) -> Mapping[str, object]:
        return self._running.records.journal.trace(last)

    def emit(self, chunks: Sequence[Chunk]) -> None:
        """Hand the chunks of a round to their readers."""
        for chunk in chunks:
            reader = self._readers.get(chunk.seq_id)
            if reader is None:
                continue
            if chunk.finish is not None:
                del self._readers[chunk.seq_id]
            if (
                chunk.finish is FinishReason.ERROR
                and self._running.coordinator.can_resume_elsewhere
            ):
                reader.put_nowait(WorkerLost(chunk.error or "the engine ends; send it again"))
            else:
                reader.put_nowait(chunk)

    def end(self, seq_id: int, error: SpecserveError) -> None:
        """End the text of a sequence that gets no chunk any more."""
        reader = self._readers.pop(seq_id, None)
        if reader is not None:
            reader.put_nowait(error)


class SpecserveServer:
    """The server class that an LLMConfig names. Serve awaits its constructor."""

    async def __init__(self, llm_config: Any) -> None:  # type: ignore[misc]
        self._llm_config, self._config = llm_config, config_of(llm_config)
        join_serve(self._config)
        config, service = self._config, LocalService()
        group = get_current_placement_group()
        assert group is not None, "get_deployment_options asks for one"
        num_gpus = sum(bundle.get("GPU", 0.0) for bundle in group.bundle_specs)
        fitted = with_drafts_that_fit(config, num_gpus=num_gpus)
        wanted = bundles(fitted, has_gpus=num_gpus > 0)
        tokenizer = Tokenizer.load(config.target.path, revision=config.target.revision)
        self._running = await RunningEngine.start(
            config,
            wanted,
            replica=serve.get_replica_context().replica_id.unique_id,
            emit=service.emit,
            on_displaced=service.end,
        )
        service.attach(self._running)
        info = self._running.group.info
        served = ServedModel.of(config, info, created=int(time.time()))
        registry = Registry()
        access = ClientAccess.from_config(config.http, registry)
        model = ModelBackend.from_config(config, service, tokenizer, served, registry)
        models = ModelDirectory([served.name], [model])
        self._app = build(models, config, registry, access, tracer_from_environment())
        freeze_objects()

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Yield the answer of a chat, or its events as text, or one error."""
        from ray.llm._internal.serve.core.configs.openai_api_models import ChatCompletionResponse

        async for part in self._answer(
            CHAT_COMPLETIONS, request, raw_request_info, ChatCompletionResponse
        ):
            yield part

    async def completions(
        self, request: Any, raw_request_info: Any = None
    ) -> AsyncGenerator[Any, None]:
        """Yield the answer of a completion, or its events as text, or one error."""
        from ray.llm._internal.serve.core.configs.openai_api_models import CompletionResponse

        async for part in self._answer(COMPLETIONS, request, raw_request_info, CompletionResponse):
            yield part

    async def tokenize(
        self, request: Any, raw_request_info: Any = None
    ) -> AsyncGenerator[Any, None]:
        from ray.llm._internal.serve.core.configs.openai_api_models import TokenizeResponse

        async for part in self._answer(TOKENIZE, request, raw_request_info, TokenizeResponse):
            yield part

    async def detokenize(
        self, request: Any, raw_request_info: Any = None
    ) -> AsyncGenerator[Any, None]:
        from ray.llm._internal.serve.core.configs.openai_api_models import DetokenizeResponse

        async for part in self._answer(DETOKENIZE, request, raw_request_info, DetokenizeResponse):
            yield part

    async def check_health(self) -> None:
        """Raise WorkerLost when this replica can serve no more; Serve then replaces all of it."""
        self._running.health.check()

    async def llm_config(self) -> Any:
        return self._llm_config

    async def __serve_build_asgi_app__(self) -> Any:
        """Return our HTTP server, which direct streaming puts behind Serve's proxy."""
        return self._app

    async def __del__(self) -> None:
        if hasattr(self, "_running"):
            await self._running.close()

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """Return the options of the replicas: one bundle each for coordinator, ranks and draft."""
        config = config_of(llm_config)
        num_gpus = ray.cluster_resources().get("GPU", 0.0) if ray.is_initialized() else 0.0
        fitted = with_drafts_that_fit(config, num_gpus=num_gpus)
        options = engine_options(config, bundles(fitted, has_gpus=num_gpus > 0))
        options.pop("request_router_config", None)  # it reads our gateway's requests
        own = copy.deepcopy(llm_config.deployment_config)
        actor = own.pop("ray_actor_options", {}) | options["ray_actor_options"]
        if llm_config.runtime_env:
            actor["runtime_env"] = {**actor.get("runtime_env", {}), **llm_config.runtime_env}
        return {**options, **own, "ray_actor_options": actor}

    async def _answer(
        self, path: str, request: Any, raw_request_info: Any, kind: Any
    ) -> AsyncGenerator[Any, None]:
        """Yield what our HTTP server answers, in Ray Serve LLM's classes."""
        fields = request.model_dump(mode="json", by_alias=True, exclude_unset=True)
        headers = {} if raw_request_info is None else raw_request_info.headers
        async with post(self._app, path, json.dumps(fields).encode(), headers) as answer:
            if answer.status >= 400:
                yield await _error(answer)
            elif getattr(request, "stream", False):
                async for piece in answer.pieces:
                    yield piece.decode()
            else:
                yield kind.model_validate_json(await answer.read())


async def _error(answer: Answer) -> Any:
    from ray.llm._internal.serve.core.configs.openai_api_models import ErrorInfo, ErrorResponse

    error = json.loads(await answer.read())["error"]
    return ErrorResponse(
        error=ErrorInfo(
            message=error["message"],
            type=error["type"],
            param=error.get("param"),
            code=answer.status,
        )
    )
