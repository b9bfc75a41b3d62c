"""The sampling parameters that a checkpoint recommends, in its generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specserve.errors import BadValue, UnsupportedModel
from specserve.json_files import read_object
from specserve.models.checkpoints.library import GENERATION_CONFIG
from specserve.sampling_params import Sampling

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters that change the distribution, and that requests call by the same name."""


def recommended_sampling(directory: Path) -> Mapping[str, float]:
    """Return what the file says of these parameters; nothing if there is none.

    Raises UnsupportedModel, before any weights are read, for values that no request could have.
    """
    path = directory / GENERATION_CONFIG
    if not path.is_file():
        return {}
    try:
        stated = read_object(path)
        values = {name: stated[name] for name in NAMES if stated.get(name) is not None}
        sampling = Sampling(**values)
    except (ValueError, BadValue) as error:
        raise UnsupportedModel(
            f"{directory} recommends sampling that cannot be: {error} ({GENERATION_CONFIG}); "
            "correct it, or set target.sampling_defaults to none"
        ) from error
    return {name: getattr(sampling, name) for name in values}
