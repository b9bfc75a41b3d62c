"""Load and unload adapters while the server runs, by vLLM's paths and names.

The paths are there only if `adapters.load_from` is set; keys need a scope of their own for them.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI
from pydantic import Field
from starlette.responses import Response

from specserve.api.key_check import LOAD_ADAPTER, UNLOAD_ADAPTER
from specserve.api.model_directory import ModelBackend, ModelDirectory
from specserve.api.responses import json_response
from specserve.api.strict_model import Body
from specserve.config.fields import NAME
from specserve.errors import AdapterError, BadValue
from specserve.features.adapters.files import read_adapter
from specserve.types import Adapter, FinishReason, Request, Warp

MAX_ADAPTERS = 10_000
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


def add_routes(app: FastAPI, models: ModelDirectory) -> None:
    """Let clients load and unload adapters of these models."""
    loading = AdapterLoading(models)
    app.post(LOAD_ADAPTER)(loading.load)
    app.post(UNLOAD_ADAPTER)(loading.unload)


class AdapterLoading:
    """Handlers of the two paths."""

    def __init__(self, models: ModelDirectory) -> None:
        self._models = models

    async def load(self, body: LoadAdapterBody) -> Response:
        """Load an adapter; it is refused if the target cannot use it."""
        _refuse_unknown(body)
        model = self._find(body.model)
        adapter = await asyncio.to_thread(_read, model, body.lora_name, body.lora_path)
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


def _read(model: ModelBackend, name: str, path: str) -> Adapter:
    """Return an adapter that a client wants to load. Raises BadValue."""
    if not NAME.fullmatch(name):
        raise BadValue(
            "lora_name begins with a letter or a digit and has nothing but letters, digits, "
            "'-', '_' and '.'",
            param="lora_name",
        )
    if len(model.adapters.names) >= MAX_ADAPTERS:
        raise BadValue(f"there are {MAX_ADAPTERS} adapters; unload one", param="lora_name")
    assert model.config.adapters.load_from is not None
    allowed = Path(model.config.adapters.load_from).resolve()
    try:
        directory = (allowed / path).resolve()
        if not directory.is_relative_to(allowed):
            raise BadValue(
                "lora_path is not below the directory that adapters.load_from allows",
                param="lora_path",
            )
        adapter = read_adapter(name, str(directory))
    except (AdapterError, ValueError, OSError) as error:
        raise BadValue(str(error).replace(f"{allowed}/", ""), param="lora_path") from error
    if model.adapters.get(name) not in (None, adapter):
        raise BadValue(
            f"the adapter {name!r} is there with other files; unload it first", param="lora_name"
        )
    return adapter


def _refuse_unknown(body: Body) -> None:
    if body.unknown:
        raise body.unknown_error(body.unknown[0])
