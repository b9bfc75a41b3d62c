"""Our config from an LLMConfig of Ray Serve LLM. Knows that class by its attributes only."""

from __future__ import annotations

from typing import Any

from specserve.config.checks import require_no_pool
from specserve.config.tree import Config, config_from_keys
from specserve.errors import ConfigError

DEMO = "demo"
ACCELERATOR = "ray.io/accelerator-type"
NOT_OURS = {
    "placement_group_config": "target.* and draft.* in engine_kwargs say what a replica needs",
    "lora_config": "name adapters in engine_kwargs, as adapters.paths",
}
"""Keys of an LLMConfig that would do nothing, and what takes their place."""
ANY_HOST = "0.0.0.0"


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
