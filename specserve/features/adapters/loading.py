"""Load and unload adapters while the server runs, by vLLM's paths and names.

The paths are there only if `adapters.load_from` is set; keys need a scope of their own for them.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Annotated

from pydantic import Field
from starlette.responses import Response

from specserve.api.model_directory import ModelBackend, ModelDirectory
from specserve.api.responses import json_response
from specserve.api.strict_model import Body
from specserve.errors import BadValue
from specserve.types import Adapter, FinishReason, Request, Warp

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
Name = Annotated[str, Field(min_length=1, max_length=100)]
BASE = Field(None, description="The model whose adapter it is, where several are served.")


class LoadAdapterBody(Body):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="A directory below adapters.load_from, or a path from there."
    )
    model: Name | None = BASE


class UnloadAdapterBody(Body):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: Name
    model: Name | None = BASE


class AdapterLoading:
    """Handlers of the two paths."""

    def __init__(self, models: ModelDirectory) -> None:
        self._models = models

    async def load(self, body: LoadAdapterBody) -> Response:
        """Load an adapter; it is refused if the target cannot use it."""
        _refuse_unknown(body)
        model = self._find(body.model)
        adapter = await asyncio.to_thread(model.adapters.read, body.lora_name, body.lora_path)
        await self._try(model, adapter)
        model.adapters.add(adapter)
        return json_response(model.entry(adapter))

    async def unload(self, body: UnloadAdapterBody) -> Response:
        """Take an adapter off the list; requests under way go on with it."""
        _refuse_unknown(body)
        model = self._find(body.model)
        adapter = model.adapters.remove(body.lora_name)
        return json_response({"id": model.adapters.model_name(adapter), "deleted": True})

    def _find(self, name: str | None) -> ModelBackend:
        """Return the model that gets an adapter, or loses one. Raises NotServed or BadValue."""
        model = self._models.find(name)
        model.adapters.of_model(name)
        if model.config.adapters.load_from is None:
            raise BadValue(
                f"adapters of {model.served.name!r} are not loaded by clients; the server's config "
                "gives it no adapters.load_from",
                param="model",
            )
        return model

    async def _try(self, model: ModelBackend, adapter: Adapter) -> None:
        """Write one token under the adapter, which loads it on all ranks of an engine.

        Raises BadValue with what the target says against it.
        """
        request = Request((0,), 1, Warp(temperature=0), seed=0, ignore_eos=True, adapter=adapter)
        async with aclosing(model.service.generate(request)) as chunks:
            async for chunk in chunks:
                if chunk.finish is FinishReason.ERROR:
                    raise BadValue(chunk.error or "it cannot be loaded", param="lora_path")


def _refuse_unknown(body: Body) -> None:
    if body.unknown:
        raise body.unknown_error(body.unknown[0])
