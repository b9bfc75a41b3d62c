"""An application of Ray Serve LLM whose engine is specserve, on a Ray of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from openai import OpenAI
from ray import serve

from tests.support.ray_server import free_port


@contextmanager
def served(
    *, deployment_config: Mapping[str, Any], engine_kwargs: Mapping[str, Any], **of_ray: Any
) -> Iterator[OpenAI]:
    """Serve the demo and yield a client; `of_ray` goes to `ray.init`."""
    from ray.serve.llm import LLMConfig, build_openai_app

    port = free_port()
    ray.init(num_cpus=8, include_dashboard=False, logging_level=logging.ERROR, **of_ray)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        config = LLMConfig(
            model_loading_config={"model_id": "demo"},
            server_cls="specserve.features.ray_serve_llm.server:SpecserveServer",
            deployment_config=dict(deployment_config),
            engine_kwargs=dict(engine_kwargs),
        )
        serve.run(build_openai_app({"llm_configs": [config]}), name="llm", route_prefix="/")
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
            yield client
    finally:
        serve.shutdown()
        ray.shutdown()
