"""Objects with the attributes of an LLMConfig, for tests without Ray Serve LLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def llm_config(**changed: Any) -> Any:
    """Return an object with the attributes of Ray's LLMConfig."""
    loading = {"model_id": "demo", "model_source": None} | changed.pop("loading", {})
    return SimpleNamespace(
        **{
            "model_loading_config": SimpleNamespace(**loading),
            "engine_kwargs": {},
            "deployment_config": {},
            "accelerator_type": None,
            "placement_group_config": None,
            "lora_config": None,
            "runtime_env": None,
            **changed,
        }
    )
