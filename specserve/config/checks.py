"""Checks of keys that contradict one another, each within one model or one application."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from specserve.config.features import check_features
from specserve.config.fields import NAME
from specserve.config.kinds import NGRAM_KINDS
from specserve.config.sections import DraftConfig, TargetConfig
from specserve.errors import ConfigError

if TYPE_CHECKING:
    from specserve.config.tree import Config

ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")


def check_config(config: Config) -> None:
    """Raise ConfigError for keys that contradict one another."""
    speculation, cache, replicas = config.speculation, config.cache, config.replicas
    check_application(config)
    check_draft(config)
    _check_page_dtype(config)
    if speculation.gamma is not None and speculation.gamma > speculation.max_gamma:
        raise ConfigError(
            f"speculation.gamma {speculation.gamma} is above "
            f"speculation.max_gamma {speculation.max_gamma}; lower the one or raise the other"
        )
    if cache.pages is not None and cache.memory_fraction is not None:
        raise ConfigError(
            "cache.pages and cache.memory_fraction say the same thing twice; give one of them"
        )
    if replicas.min > replicas.max:
        raise ConfigError(
            f"replicas.min {replicas.min} is above replicas.max {replicas.max}; "
            "lower the one or raise the other"
        )


def check_application(config: Config) -> None:
    """Raise ConfigError for keys of the gateways and the application that contradict another."""
    replicas = config.replicas
    if not NAME.fullmatch(config.name):
        raise ConfigError(
            f"name {config.name!r} must begin with a letter or a digit and have nothing but "
            "letters, digits, '-', '_' and '.', such as my-model-8000"
        )
    if (root := config.http.root_path) and not ROOT_PATH.fullmatch(root):
        raise ConfigError(
            f"http.root_path {root!r} must begin with / and not end with it, such as /my-model"
        )
    if (config.http.tls_cert is None) != (config.http.tls_key is None):
        raise ConfigError(
            "http.tls_cert and http.tls_key go together: a certificate and the key that belongs "
            "to it; give both or neither"
        )
    if replicas.min_gateways > replicas.gateways:
        raise ConfigError(
            f"replicas.min_gateways {replicas.min_gateways} is above "
            f"replicas.gateways {replicas.gateways}; lower the one or raise the other"
        )


def check_draft(config: Config) -> None:
    """Raise ConfigError for keys of the draft, or of a feature, that contradict one another."""
    draft = config.draft
    check_features(config)
    if draft.kind == "neural" and draft.path is None:
        raise ConfigError(
            "draft.kind neural needs draft.path, the model that drafts; "
            "give --draft, or choose a draft.kind that needs none"
        )
    _check_quantize(draft)
    _check_placement(draft, config.target)
    _check_learn(draft)


def _check_quantize(draft: DraftConfig) -> None:
    if draft.quantize is not None and draft.kind != "neural":
        raise ConfigError(
            f"draft.quantize rounds a neural draft's weights, and draft.kind is {draft.kind}; "
            "leave it out, or name a draft model with draft.path"
        )
    if draft.quantize == "fp8" and draft.device == "cpu":
        raise ConfigError(
            "draft.quantize: fp8 needs a GPU, and draft.device is cpu, which multiplies no FP8; "
            "use int8"
        )


def _check_page_dtype(config: Config) -> None:
    if config.cache.dtype == "fp8" and config.target.device == "cpu":
        raise ConfigError(
            "cache.dtype: fp8 needs a GPU, and target.device is cpu, where pages have the model's "
            "number format; leave cache.dtype out"
        )


def _check_learn(draft: DraftConfig) -> None:
    if draft.learn is not None and draft.kind not in NGRAM_KINDS:
        raise ConfigError(
            f"draft.learn belongs to the kinds {', '.join(NGRAM_KINDS)}, "
            f"and draft.kind is {draft.kind}; leave it out"
        )


def _check_placement(draft: DraftConfig, target: TargetConfig) -> None:
    """Raise ConfigError for a draft that cannot live where `draft.placement` says."""
    if draft.placement != "together":
        return
    if draft.num_gpus is not None or draft.label_selector:
        raise ConfigError(
            "draft.num_gpus and draft.label_selector say where a draft apart lives, and "
            "draft.placement is together; leave them out"
        )
    if draft.device not in ("auto", target.device):
        raise ConfigError(
            f"draft.placement together puts the draft on the target's device, {target.device}, "
            f"and draft.device is {draft.device}; leave draft.device out"
        )


def require_no_pool(config: Config, what: str) -> None:
    """Raise ConfigError if the draft is in a pool, which `what` cannot use."""
    if config.draft.is_pooled:
        raise ConfigError(
            f"draft.pool is of applications that `specserve serve` or `serve deploy` runs, and "
            f"{what}; leave it out"
        )
