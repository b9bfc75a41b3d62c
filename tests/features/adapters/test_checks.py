"""The keys of adapters that are refused when a config is parsed."""

from __future__ import annotations

from typing import Any

import pytest

from specserve.config.tree import config_from_keys
from specserve.errors import ConfigError


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"adapters.paths": {"a:b": "/adapters/a"}}, "names the adapter 'a:b'; a name begins"),
        ({"adapters.load_from": "/adapters", "replicas.gateways": 2}, "gateways is 2; set it to 1"),
    ],
)
def test_names_and_gateways_that_adapters_cannot_have_are_refused(
    keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_keys(keys)
