"""The features of this installation: folders below `features/`, which the core does not import.

The core runs without any of them. Where it meets one it says `part("eagle.opening:open_heads")`,
so that `grep 'part("eagle'` finds all that a feature is to the core. Without the folder the part is
missing, and a config that asks for it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from specserve.errors import ConfigError

if TYPE_CHECKING:
    from specserve.config.tree import Config

FEATURES: Mapping[str, str] = {
    "adapters": "low-rank adapters (LoRA) of the target",
    "cascade": "cascades: several drafters, of which each reviews the next one's tokens",
    "draft_pools": "draft pools: one draft for several engines",
    "eagle": "EAGLE-3 heads, DFlash drafts and draft heads",
    "encoder_decoder": "T5 and its kin",
    "layer_skip": "drafting with some of the target's own layers",
    "other_tokenizer": "draft models with another tokenizer than the target",
    "ray_serve_llm": "an engine of Ray Serve LLM",
}
"""Every feature that there is, and what it is."""
CHECKS: Mapping[str, str] = {
    "adapters": "adapters.checks:check_config",
    "cascade": "cascade.checks:check_config",
    "draft_pools": "draft_pools.checks:check_config",
    "eagle": "eagle.checks:check_config",
    "layer_skip": "layer_skip.checks:check_config",
}
"""Functions of a config that raise ConfigError for keys of a feature that contradict others."""
FEATURE_OF_KIND: Mapping[str, str] = {
    "vertical": "cascade",
    "horizontal": "cascade",
    "cascade": "cascade",
    "layer_skip": "layer_skip",
    "heads": "eagle",
    "eagle": "eagle",
    "dflash": "eagle",
}
"""Values of draft.kind that need a feature."""
KEYS: Mapping[str, tuple[str, ...]] = {
    "adapters": ("adapters",),
    "cascade": ("draft.stages", "draft.k", "draft.lenience"),
    "draft_pools": ("draft.pool",),
    "layer_skip": ("draft.skip",),
}
"""Keys and sections of the config that need a feature, unless they have their defaults."""


@cache
def has(feature: str) -> bool:
    """Return True if the folder of a feature is here."""
    assert feature in FEATURES, f"{feature} is no feature"
    return find_spec(f"specserve.features.{feature}") is not None


def part(name: str) -> Any:
    """Return what a feature's module defines: `part("cascade.opening:open_cascade")`.

    Raises ConfigError if the folder of the feature is not here.
    """
    module, _, defined = name.partition(":")
    feature = module.partition(".")[0]
    require(feature)
    return getattr(import_module(f"specserve.features.{module}"), defined)


def require(feature: str) -> None:
    """Raise ConfigError if the folder of a feature is not here."""
    if not has(feature):
        raise ConfigError(
            f"this installation has no {FEATURES[feature]}: specserve/features/{feature} is "
            "missing; leave out the keys that need it, or install the whole of specserve"
        )


def check_features(config: Config) -> None:
    """Raise ConfigError for keys that need a missing feature, or that a feature refuses."""
    if config.draft.kind in FEATURE_OF_KIND:
        require(FEATURE_OF_KIND[config.draft.kind])
    defaults = type(config)()
    for feature, keys in KEYS.items():
        if any(attrgetter(key)(config) != attrgetter(key)(defaults) for key in keys):
            require(feature)
    for feature, check in CHECKS.items():
        if has(feature):
            part(check)(config)
