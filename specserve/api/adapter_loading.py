"""Load and unload adapters while the server runs, by vLLM's paths and names.

The paths are there only if `adapters.load_from` is set; keys need a scope of their own for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Annotated

from pydantic import Field
from starlette.responses import Response

from specserve.api.adapters import AdapterRegistry
from specserve.api.responses import json_response
from specserve.api.service import Service
from specserve.api.strict_model import Body
from specserve.errors import BadValue
from specserve.types import Adapter, FinishReason, Request, Warp

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
Name = Annotated[str, Field(min_length=1, max_length=100)]


class LoadAdapterBody(Body):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="A directory below adapters.load_from, or a path from there."
    )


class UnloadAdapterBody(Body):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: Name


class AdapterLoading:
    """Handlers of the two paths."""

    def __init__(
        self,
        adapters: AdapterRegistry,
        service: Service,
        entry: Callable[[Adapter | None], dict[str, object]],
    ) -> None:
        self._adapters, self._service, self._entry = adapters, service, entry

    async def load(self, body: LoadAdapterBody) -> Response:
        """Load an adapter; it is refused if the target cannot use it."""
        _refuse_unknown(body)
        adapter = await asyncio.to_thread(self._adapters.read, body.lora_name, body.lora_path)
        await self._try(adapter)
        self._adapters.add(adapter)
        return json_response(self._entry(adapter))

    async def unload(self, body: UnloadAdapterBody) -> Response:
        """Take an adapter off the list; requests under way go on with it."""
        _refuse_unknown(body)
        adapter = self._adapters.remove(body.lora_name)
        return json_response({"id": self._adapters.model_name(adapter), "deleted": True})

    async def _try(self, adapter: Adapter) -> None:
        """Write one token under the adapter, which loads it on all ranks of an engine.

        Raises BadValue with what the target says against it.
        """
        request = Request((0,), 1, Warp(temperature=0), seed=0, ignore_eos=True, adapter=adapter)
        async with aclosing(self._service.generate(request)) as chunks:
            async for chunk in chunks:
                if chunk.finish is FinishReason.ERROR:
                    raise BadValue(chunk.error or "it cannot be loaded", param="lora_path")


def _refuse_unknown(body: Body) -> None:
    if body.unknown:
        raise body.unknown_error(body.unknown[0])
