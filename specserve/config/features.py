"""The features of this installation: folders below `features/`, which the core does not import.

The core runs without any of them. Where it meets one it says `part("eagle.drafter:open_eagle")`,
so that `grep 'part("eagle'` finds all that a feature is to the core. Without the folder the part is
missing, and a config that asks for it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from specserve.errors import ConfigError

FEATURES: Mapping[str, str] = {
    "adapters": "low-rank adapters (LoRA) of the target",
    "cascade": "several drafters, of which each reviews the next one's tokens",
    "draft_pools": "draft pools (one draft for several engines)",
    "eagle": "EAGLE-3 heads and draft heads",
    "encoder_decoder": "T5 and its kin",
    "layer_skip": "drafting with some of the target's own layers",
    "other_tokenizer": "draft models with another tokenizer than the target",
    "ray_serve_llm": "an engine of Ray Serve LLM",
}
"""Every feature that there is, and what it is."""


@cache
def has(feature: str) -> bool:
    """Return True if the folder of a feature is here."""
    assert feature in FEATURES, f"{feature} is no feature"
    return find_spec(f"specserve.features.{feature}") is not None


def part(name: str) -> Any:
    """Return what a feature's module defines: `part("cascade.build:open_cascade")`.

    Raises ConfigError if the folder of the feature is not here.
    """
    module, _, defined = name.partition(":")
    feature = module.partition(".")[0]
    if not has(feature):
        raise ConfigError(
            f"this installation has no {FEATURES[feature]}: specserve/features/{feature} is "
            "missing; leave out the keys that need it, or install the whole of specserve"
        )
    return getattr(import_module(f"specserve.features.{module}"), defined)
