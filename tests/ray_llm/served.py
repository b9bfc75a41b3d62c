"""An application of Ray Serve LLM whose engine is specserve, on a Ray of its own.

`python -m tests.ray_llm.served --port PORT` serves what `specserve serve` would, until Ctrl-C.
"""

from __future__ import annotations

import argparse
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import ray
import yaml
from openai import OpenAI
from ray import serve

from specserve.cli.default_model import default_model
from tests.support.ray_server import free_port


@contextmanager
def served(
    *,
    deployment_config: Mapping[str, Any],
    engine_kwargs: Mapping[str, Any],
    model: Mapping[str, str] = {"model_id": "demo"},
    port: int | None = None,
    **of_ray: Any,
) -> Iterator[OpenAI]:
    """Serve a model, the demo by default, and yield a client; `of_ray` goes to `ray.init`."""
    from ray.serve.llm import LLMConfig, build_openai_app

    port = port or free_port()
    ray.init(num_cpus=8, include_dashboard=False, logging_level=logging.ERROR, **of_ray)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        config = LLMConfig(
            model_loading_config=dict(model),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    given = (setting.partition("=") for setting in options.set)
    keys = {**default_model(), **{key: yaml.safe_load(value) for key, _, value in given}}
    target = keys.pop("target", {"path": "demo"})
    model = {"model_id": keys.pop("model", "demo"), "model_source": target["path"]}
    with (
        suppress(KeyboardInterrupt),
        served(deployment_config={}, engine_kwargs=keys, model=model, port=options.port),
    ):
        threading.Event().wait()


if __name__ == "__main__":
    main()
