"""Local paths of a config are held against the nodes that could hold their processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.serve.exceptions import RayServeException

from specserve.cluster.app import build
from specserve.cluster.model_paths import local_models, path_trouble, require_on_a_node
from specserve.cluster.placement import NodeResources
from specserve.config.tree import DEMO, config_from_keys
from specserve.errors import ModelNotFound

HEAD = NodeResources("10.0.0.1", {"CPU": 4.0}, {}, {}, "head")
CARD = NodeResources("10.0.0.2", {"CPU": 8.0, "GPU": 2.0}, {}, {"disk": "models"}, "card")


def keys_of(**given: object) -> list[tuple[str, str, str]]:
    config = config_from_keys({key.replace("__", "."): value for key, value in given.items()})
    return [
        (model.key, model.path, model.bundle.name) for model in local_models(config, has_gpus=False)
    ]


def test_local_paths_are_looked_for_where_they_are_opened_and_hub_names_nowhere() -> None:
    target, draft = str(DEMO / "target"), str(DEMO / "draft")
    assert keys_of() == [
        ("target.path", target, "target-0"),
        ("target.path", target, "gateway"),
        ("draft.path", draft, "draft"),
    ]
    assert keys_of(draft__placement="together")[-1] == ("draft.path", draft, "target-0")
    assert keys_of(target__path="owner/model", draft__path="owner/draft") == []


def test_a_path_that_one_fitting_node_has_is_taken_and_one_that_none_has_is_refused() -> None:
    keys = {"target.path": "/models/big", "target.device": "cuda", "draft.kind": "none"}
    model = next(local_models(config_from_keys(keys), has_gpus=True))
    asked: list[str] = []

    def lack(node: str, path: str) -> str | None:
        asked.append(node)
        return "does not exist"

    with pytest.raises(
        ModelNotFound, match=r"/models/big is on no node that could hold the target"
    ):
        require_on_a_node(model, [HEAD, CARD], lack)
    assert asked == ["card"], "the head has no GPU, and may lack the models"
    require_on_a_node(model, [HEAD], lack)  # nodes with GPUs are yet to come
    require_on_a_node(model, [HEAD, CARD], lambda node, path: None)


def test_a_checkpoint_is_a_directory_with_a_config(tmp_path: Path) -> None:
    (file := tmp_path / "tables").touch()
    assert path_trouble(str(tmp_path / "no"), is_checkpoint=False) == "does not exist"
    assert path_trouble(str(file), is_checkpoint=True) == "is a file"
    assert path_trouble(str(tmp_path), is_checkpoint=True) == "has no config.json"
    assert path_trouble(str(file), is_checkpoint=False) is None
    assert path_trouble(str(DEMO / "target"), is_checkpoint=True) is None


def test_a_gguf_file_is_a_checkpoint_and_so_is_a_directory_with_one(tmp_path: Path) -> None:
    (file := tmp_path / "tiny.gguf").touch()
    assert path_trouble(str(file), is_checkpoint=True) is None
    assert path_trouble(str(tmp_path), is_checkpoint=True) is None


def test_a_misspelt_key_is_an_error_that_serve_shows_in_one_line() -> None:
    with pytest.raises(RayServeException) as refused:
        build({"limits.max_runing": 8})
    assert "did you mean limits.max_running?" in str(refused.value)
    assert "\n" not in str(refused.value)
