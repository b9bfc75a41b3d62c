"""The HTTP paths of those who run a server: probes, release, metrics and traces."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Query
from starlette.responses import Response

from specserve import metrics, vllm_metrics
from specserve.api.access import ClientAccess
from specserve.api.key_file import KeyTrouble
from specserve.api.model_directory import ModelBackend, ModelDirectory
from specserve.api.responses import json_response, reproducible_members
from specserve.api.service import ModelStatus, Status
from specserve.errors import SpecserveError, Unavailable
from specserve.metrics import Registry, Snapshot
from specserve.wire.version import RELEASE

STATUS_TIMEOUT_S = 5.0  # an engine that does not send its status within that time is not healthy
Rounds = Annotated[
    int | None,
    Query(ge=1, le=2000, description="How many of the last rounds; left out, all that are kept."),
]
ModelName = Annotated[str | None, Query(description="One of several models.")]


class Probes:
    """Handlers of these paths. `registry` is that of this process."""

    def __init__(
        self, models: ModelDirectory, registry: Registry, access: ClientAccess | None = None
    ) -> None:
        self._models, self._registry, self._access = models, registry, access

    async def health(self, model: ModelName = None) -> Response:
        """Return 200 if the workers make progress: of one of the models at least, or of `model`."""
        status, trouble = await self._status(), self._key_trouble()
        self._require_healthy(model, status)
        if not status.healthy:
            raise Unavailable(status.why or "the workers make no progress")
        healthy: dict[str, object] = {"status": "healthy"}
        if status.replicas:
            healthy |= reproducible_members(status.irreproducible)
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
        merged = metrics.merge(snapshots)
        text = metrics.render(merged)
        for first in self._models.backends[:1]:
            if first.config.http.vllm_metrics:
                text += vllm_metrics.render(merged, first.served.name)
        return Response(text, media_type=metrics.CONTENT_TYPE)

    async def trace(self, rounds: Rounds = None, model: ModelName = None) -> Response:
        """Return the last rounds of an engine, for Perfetto: of `model`, or of the first one."""
        backend = self._models.backends[0] if model is None else self._models.find(model)
        return json_response(dict(await backend.service.trace(rounds)))

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
