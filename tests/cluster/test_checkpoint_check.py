"""The check of the models' files that runs in a forked process while Ray starts."""

from __future__ import annotations

import os

import pytest

from specserve.cluster.checkpoint_check import checkpoint_check
from specserve.cluster.engine import fork_server
from specserve.config.tree import config_from_keys
from specserve.errors import ModelNotFound


def test_a_missing_model_is_found_out_without_torch_here_and_raised_when_it_is_asked_for(
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = config_from_keys({"target.path": "missing/entirely/model"})
    with checkpoint_check(config) as require:
        assert fork_server.KEY_VARIABLE in os.environ, "Ray's processes inherit it"
        with pytest.raises(ModelNotFound, match="missing/entirely/model does not exist"):
            require()
    assert fork_server.KEY_VARIABLE not in os.environ
    assert capfd.readouterr() == ("", "")
