"""The application gets the config that a server wants, not that of a library call."""

from __future__ import annotations

from typing import Any

import pytest

from specserve.cluster.app import application
from specserve.config.tree import config_from_keys


@pytest.mark.parametrize(("given", "shared"), [("auto", True), (True, True), (False, False)])
def test_a_server_shares_weights_unless_the_config_says_no(given: object, shared: bool) -> None:
    app: Any = application(config_from_keys({"weights.shared": given}))
    config = app._bound_deployment.init_args[0]
    assert config.weights.shared is shared
