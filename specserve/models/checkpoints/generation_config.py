"""The sampling parameters that a checkpoint recommends, in its generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specserve.config.sections import TargetConfig
from specserve.errors import BadValue, UnsupportedModel
from specserve.json_files import read_object
from specserve.sampling_params import Sampling

GENERATION_CONFIG = "generation_config.json"
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters that change the distribution, and that requests call by the same name."""


def sampling_defaults(directory: Path, target: TargetConfig) -> Mapping[str, float]:
    """Return the parameters of requests that do not name them; nothing if none are recommended.

    Raises UnsupportedModel for values that no request could have. Needs no torch.
    """
    path = directory / GENERATION_CONFIG
    if target.sampling_defaults == "none" or not path.is_file():
        return {}
    try:
        stated = read_object(path)
    except ValueError as error:
        raise UnsupportedModel(f"{directory}: {error}") from error
    values = {name: stated[name] for name in RECOMMENDED if stated.get(name) is not None}
    try:
        sampling = Sampling(**values)
    except BadValue as error:
        raise UnsupportedModel(
            f"{directory} recommends sampling that cannot be: {error} ({GENERATION_CONFIG}); "
            "correct it, or set target.sampling_defaults to none"
        ) from error
    return {name: getattr(sampling, name) for name in values}
