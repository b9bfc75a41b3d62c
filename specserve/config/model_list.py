"""The list `models` of a config: what may stand beside it, and the keys of each of its models.

Knows sections by name, and none of their rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from specserve.errors import ConfigError

MODELS = "models"
OF_ONE_MODEL = ("model", "target", "draft", "demo", "adapters")
"""Keys that describe a single model, which stand in its entry if there are several."""
OF_ALL_MODELS = (
    ("replicas", "gateways"),
    ("replicas", "min_gateways"),
    ("limits", "max_body_bytes"),
)
"""Keys of the gateways, which all models share, in sections that an entry may have, too."""
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")


def deployment_suffix(model: str) -> str:
    """Return the part of a deployment's name that says which model it serves."""
    return model.replace("/", "-")


def check_top_level(given: Mapping[str, object]) -> None:
    """Raise ConfigError if the list stands beside keys of a single model."""
    beside = [key for key in OF_ONE_MODEL if given.get(key) is not None]
    if beside:
        raise ConfigError(
            f"models lists several models, and {', '.join(beside)} at the top level "
            f"describe{'s' if len(beside) == 1 else ''} a single one; "
            "move them into an entry of models, or leave models out"
        )


def check_names(names: Sequence[str]) -> None:
    """Raise ConfigError unless every entry has a name, and a deployment, of its own."""
    seen: dict[str, int] = {}
    for number, name in enumerate(names):
        if not MODEL_NAME.fullmatch(name) or len(name) > 80:
            raise ConfigError(
                f"models[{number}].name must be the name that requests choose the model by: up to "
                f"80 letters, digits, '-', '_', '.' and '/', such as org/model, not {name!r}"
            )
        first = seen.setdefault(deployment_suffix(name), number)
        if first != number:
            raise ConfigError(
                f"models[{first}] and models[{number}] have one name, {name!r}; "
                "give each another one"
            )


def keys_of_each(
    given: Mapping[str, object],
) -> Iterator[tuple[dict[str, object], dict[str, object]]]:
    """Yield the keys that all models share, and one entry's keys, for each entry."""
    entries = given[MODELS]
    assert isinstance(entries, Sequence)
    shared = {key: value for key, value in given.items() if key != MODELS}
    for number, entry in enumerate(entries):
        assert isinstance(entry, Mapping)
        for section, key in OF_ALL_MODELS:
            inner = entry.get(section)
            if isinstance(inner, Mapping) and inner.get(key) is not None:
                raise ConfigError(
                    f"models[{number}].{section}.{key} belongs to the gateways, which all models "
                    f"share; write {section}.{key} at the top level"
                )
        own = {key: value for key, value in entry.items() if key != "name"}
        yield shared, own | {"model": entry.get("name")}
