"""specserve as an engine of Ray Serve LLM: `LLMConfig(server_cls=...SpecserveServer)`.

A replica is an engine with its workers, as in our own application, and our HTTP server in the same
process. Ray's router, or its proxy with direct streaming, is in front of it. Knows Ray Serve LLM
by its protocol only: what it takes and gives are that package's own classes.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve._private.logging_utils import get_serve_logs_dir
from ray.util import get_current_placement_group

from specserve.api.access import ClientAccess
from specserve.api.app import CHAT_COMPLETIONS, COMPLETIONS, build
from specserve.api.in_process import Answer, post
from specserve.api.model_directory import ModelBackend, ModelDirectory
from specserve.api.service import ServedModel
from specserve.api.tokenizer import Tokenizer
from specserve.cluster.app import engine_options
from specserve.cluster.engine.long_lived import freeze_objects
from specserve.cluster.engine.running_engine import RunningEngine
from specserve.cluster.gateway.request_router import CACHED_TOKENS, RESTARTS
from specserve.cluster.logs import join_serve
from specserve.cluster.placement import bundles, with_drafts_that_fit
from specserve.errors import BadRequest, BadValue
from specserve.features.ray_serve_llm.config import config_of
from specserve.features.ray_serve_llm.metrics import RayMetrics
from specserve.features.ray_serve_llm.service import LocalService
from specserve.metrics import Registry, merge
from specserve.tracing import tracer_from_environment

TOKENIZE, DETOKENIZE, EMBEDDINGS = "/tokenize", "/detokenize", "/v1/embeddings"
SLEEP_LEVELS = (1, 2)
EXPORT_EVERY_S = 2.0
log = logging.getLogger(__name__)


class SpecserveServer:
    """The server class that an LLMConfig names. Serve awaits its constructor."""

    async def __init__(self, llm_config: Any) -> None:  # type: ignore[misc]
        self._llm_config, self._config = llm_config, config_of(llm_config)
        join_serve(self._config)
        config, self._service = self._config, LocalService()
        group = get_current_placement_group()
        assert group is not None, "get_deployment_options asks for one"
        num_gpus = sum(bundle.get("GPU", 0.0) for bundle in group.bundle_specs)
        fitted = with_drafts_that_fit(config, num_gpus=num_gpus)
        self._bundles = bundles(fitted, has_gpus=num_gpus > 0)
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._changing = asyncio.Lock()  # held while the engine falls asleep or wakes up
        self._profiled_from: int | None = None  # rounds before start_profile
        tokenizer = Tokenizer.load(config.target.path, revision=config.target.revision)
        await self._start()
        info = self._service.running.group.info
        served = ServedModel.of(config, info, created=int(time.time()))
        self._registry = Registry()
        access = ClientAccess.from_config(config.http, self._registry)
        model = ModelBackend.from_config(config, self._service, tokenizer, served, self._registry)
        models = ModelDirectory([served.name], [model])
        self._app = build(models, config, self._registry, access, tracer_from_environment())
        if llm_config.log_engine_metrics:
            self._exports = asyncio.create_task(self._export_metrics())
        freeze_objects()

    async def _start(self) -> None:
        """Start the workers and serve by them."""
        self._service.attach(
            await RunningEngine.start(
                self._config,
                self._bundles,
                replica=self._replica,
                emit=self._service.emit,
                on_displaced=self._service.end,
            )
        )

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

    async def embeddings(
        self, request: Any, raw_request_info: Any = None
    ) -> AsyncGenerator[Any, None]:
        """Yield our HTTP server's refusal: this engine writes text only."""
        async for part in self._answer(EMBEDDINGS, request, raw_request_info, None):
            yield part

    async def check_health(self) -> None:
        """Raise WorkerLost when this replica can serve no more; Serve then replaces all of it."""
        if not self._service.is_sleeping:
            self._service.running.health.check()

    async def record_routing_stats(self) -> dict[str, int]:
        """Return what Serve passes to request routers, which may know our names."""
        group = self._service.running.group
        return {
            CACHED_TOKENS: group.info.num_pages * group.info.page_size,
            RESTARTS: group.restarts["target"],
        }

    async def reset_prefix_cache(self) -> None:
        """Let later requests find no page of earlier ones."""
        self._service.reset_prefix_cache()

    async def pause(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Let new requests wait until `resume`; `mode` says what becomes of those under way."""
        await self._service.pause(mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        self._service.resume()

    async def is_paused(self) -> bool:
        return self._service.is_paused

    async def sleep(self, level: int = 1) -> None:
        """End the workers at either of vLLM's levels, which frees their devices and caches.

        New requests wait until `wakeup`, which loads the weights again.
        """
        if level not in SLEEP_LEVELS:
            raise BadValue(f"level must be 1 or 2, not {level}", param="level")
        async with self._changing:
            if not self._service.is_sleeping:
                self._profiled_from = None
                await self._service.sleep()

    async def wakeup(self, tags: Sequence[str] | None = None) -> None:
        """Start the workers again; raises what kept them from starting, and stays asleep."""
        if tags:
            raise BadValue(
                "tags must be left out: weights and cache wake up together", param="tags"
            )
        async with self._changing:
            if self._service.is_sleeping:
                await self._start()

    async def is_sleeping(self) -> bool:
        return self._service.is_sleeping

    async def start_profile(self) -> None:
        self._profiled_from = self._service.running.coordinator.num_rounds

    async def stop_profile(self) -> str:
        """Write the rounds since `start_profile` for Perfetto; return the path in Serve's logs."""
        if self._profiled_from is None:
            raise BadRequest("stop_profile needs start_profile before it")
        num_rounds = self._service.running.coordinator.num_rounds
        first, self._profiled_from = self._profiled_from, None
        if num_rounds == first:
            raise BadRequest("no round has run since start_profile")
        trace = await self._service.trace(num_rounds - first)
        name = f"specserve-profile-{self._replica}-{first}-{num_rounds}.json"
        path = Path(get_serve_logs_dir()) / name
        path.write_text(json.dumps(trace))
        log.info("the profile of %d rounds is in %s", num_rounds - first, path)
        return str(path)

    async def collective_rpc(self, method: str, *_: Any, **__: Any) -> None:
        """Refuse: our workers have none of vLLM's methods."""
        raise BadRequest(f"collective_rpc is not supported: no worker has a method {method}")

    async def llm_config(self) -> Any:
        return self._llm_config

    async def __serve_build_asgi_app__(self) -> Any:
        """Return our HTTP server, which direct streaming puts behind Serve's proxy."""
        return self._app

    async def __del__(self) -> None:
        if hasattr(self, "_exports"):
            self._exports.cancel()
        if hasattr(self, "_service"):
            await self._service.close()

    async def _export_metrics(self) -> None:
        """Follow the engine's and our HTTP server's metrics in Ray's backend."""
        metrics = RayMetrics()
        while True:
            try:
                snapshots = [self._registry.snapshot()]
                if not self._service.is_sleeping:
                    snapshots.append(self._service.running.snapshot())
                metrics.export(merge(snapshots))
            except Exception:  # the next export catches up
                log.warning("metrics were not exported", exc_info=True)
            await asyncio.sleep(EXPORT_EVERY_S)

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
