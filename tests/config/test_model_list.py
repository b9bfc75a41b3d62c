"""A config with several models is one config for each of them, or one clear error."""

from __future__ import annotations

from typing import Any

import pytest

from specserve.config.hub_models import unpinned_models
from specserve.config.tree import config_from_file, config_from_keys
from specserve.errors import ConfigError

TWO: list[dict[str, Any]] = [
    {"name": "small", "target": {"path": "org/small"}, "limits": {"max_running": 4}},
    {
        "name": "org/large",
        "target": {"path": "org/large", "tensor_parallel": 2},
        "draft": {"path": "org/small"},
        "replicas": {"max": 3},
    },
]


def test_each_model_has_its_own_keys_and_those_of_the_top_level() -> None:
    config = config_from_keys(
        {
            "models": TWO,
            "limits": {"max_running": 8, "max_queued": 5},
            "replicas": {"min": 0, "gateways": 2},
            "http.port": 9000,
        }
    )
    small, large = config.each_model
    assert (small.model, large.model) == ("small", "org/large")
    assert (small.target.path, large.target.path) == ("org/small", "org/large")
    assert (small.draft.kind, large.draft.kind) == ("none", "neural")
    assert (small.limits.max_running, large.limits.max_running) == (4, 8)
    assert small.limits.max_queued == large.limits.max_queued == 5
    assert (small.replicas.max, large.replicas.max) == (1, 3)
    assert small.replicas.min == large.replicas.min == 0
    assert config.replicas.gateways == 2
    assert config.name == small.name == "specserve-small-org-large-9000"
    assert large.http.port == 9000


def test_a_config_of_one_model_is_its_own_only_model() -> None:
    config = config_from_keys({})
    assert config.each_model == (config,)
    config.require_one_model()


def test_an_entry_without_a_target_is_the_demo_pair() -> None:
    keys = {"models": [{"name": "it"}]}
    (part,) = config_from_file(None, keys, default_model=lambda: {"demo": {"size": "200M"}}).models
    assert (part.model, part.draft.kind, part.demo.size) == ("it", "neural", None)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"models": {"a": 1}}, "models must be a list"),
        ({"models": TWO, "target.path": "x"}, "target at the top level describes a single one"),
        ({"models": TWO, "model": "x", "draft.kind": "none"}, "model, draft at the top level"),
        ({"models": [{"target": {"path": "x"}}]}, r"models\[0\].name must be the name"),
        ({"models": [{"name": "a:b"}]}, r"models\[0\].name must be the name"),
        ({"models": [{"name": "a"}, {"name": "a"}]}, r"models\[0\] and models\[1\] have one name"),
        ({"models": [{"name": "a/b"}, {"name": "a-b"}]}, "have one name"),
        ({"models": [{"name": "a", "taget": {}}]}, r"models\[0\].taget; did you mean models\[0\]"),
        (
            {"models": [{"name": "a", "target": {"pth": 1}}]},
            r"models\[0\].target.pth; did you mean models\[0\].target.path\?",
        ),
        (
            {"models": [{"name": "a", "replicas": {"gateways": 2}}]},
            r"models\[0\].replicas.gateways belongs to the gateways",
        ),
        ({"models": TWO, "name": "/"}, "^name '/' must begin with"),
        ({"models": TWO, "replicas.min": 2}, r"^models\[0\] \(small\): replicas.min 2 is above"),
    ],
)
def test_what_cannot_be_meant_is_one_error_that_names_the_entry(
    keys: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_keys(keys)


def test_one_process_refuses_several_models() -> None:
    from specserve.llm.inprocess import open_parts

    with pytest.raises(ConfigError, match="a single one runs here"):
        open_parts(config_from_keys({"models": TWO}))


def test_a_hub_name_without_a_commit_is_named_with_its_entry() -> None:
    sections = [one.section for one in unpinned_models(config_from_keys({"models": TWO}))]
    assert sections == ["models[0].target", "models[1].target", "models[1].draft"]
