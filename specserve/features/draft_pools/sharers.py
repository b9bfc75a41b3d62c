"""The models that share a draft pool, and what its devices are opened with and need.

Knows configs and numbers; no models and no Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specserve.cluster.placement import Bundle, draft_bundle
from specserve.config.tree import Config


def pool_sharers(config: Config) -> dict[str, tuple[Config, ...]]:
    """Return the configs of the models that draft by each pool, by the pool's name."""
    sharers: dict[str, tuple[Config, ...]] = {}
    for part in config.each_model:
        if (name := part.draft.pool.name) is not None:
            sharers[name] = (*sharers.get(name, ()), part)
    return sharers


def shared_draft_config(sharers: Sequence[Config]) -> Config:
    """Return the config by which a pool's draft is opened: with the largest limits of its models.

    They have one tokenizer, so that of the first model's target serves all.
    """
    first = sharers[0]
    contexts = [part.limits.max_context for part in sharers]
    known = [context for context in contexts if context is not None]
    tokens = [part.limits.max_batch_tokens for part in sharers]
    pages = [part.cache.pages for part in sharers]
    return replace(
        first,
        limits=replace(
            first.limits,
            max_running=max(part.limits.max_running for part in sharers),
            max_batch_tokens=_largest(tokens),
            max_context=max(known) if len(known) == len(contexts) else None,
        ),
        cache=replace(first.cache, pages=_largest(pages)),
        speculation=replace(
            first.speculation, max_gamma=max(part.speculation.max_gamma for part in sharers)
        ),
    )


def engines_per_draft(config: Config) -> int:
    """Return the number of engines that one device of a model's pool drafts for at most."""
    pool = config.draft.pool
    num_engines = max(pool.targets or 0, config.replicas.max)
    return -(-num_engines * pool.devices_per_engine // pool.devices)


def pool_bundles(config: Config, *, has_gpus: bool, at_most: bool = False) -> tuple[Bundle, ...]:
    """Return what the devices of all draft pools need, one bundle each; none without a pool.

    They are those with which pools start, or as many as they grow to.
    """
    return tuple(
        draft_bundle(f"draft pool {draft.pool.name}", draft, has_gpus=has_gpus)
        for draft in (sharers[0].draft for sharers in pool_sharers(config).values())
        for _ in range(draft.pool.most_devices if at_most else draft.pool.devices)
    )


def _largest(given: Sequence[int | None]) -> int | None:
    """Return the largest of the numbers; None if one of them is left to the draft."""
    numbers = [one for one in given if one is not None]
    return max(numbers) if len(numbers) == len(given) else None
