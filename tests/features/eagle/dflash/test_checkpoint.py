"""Files of DFlash and DSpark drafts: three layouts, and what is refused before weights are read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specserve.checkpoint_files import find_checkpoints
from specserve.config.tree import config_from_keys
from specserve.errors import ConfigError, ModelError, ModelNotFound, SpecserveError
from specserve.features.eagle.dflash.config import DFlashInfo, Sight
from specserve.features.eagle.dflash.weights import DFlashWeights
from tests.support import checkpoints
from tests.support.dflash_drafts import (
    DFlashSizes,
    write_deepspec,
    write_speculators,
    write_z_lab,
)

DSPARK = DFlashSizes(markov_rank=16, from_newest=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = checkpoints.CONFIGS["llama"]()
    settings.num_hidden_layers = 4
    path = checkpoints.write(settings, tmp_path_factory.mktemp("llama") / "target")
    checkpoints.add_tokenizer(path)
    return path


def look_at(target: Path, draft: Path) -> None:
    """Do what every command does before weights are read."""
    keys = {"target.path": str(target), "draft.kind": "dflash", "draft.path": str(draft)}
    find_checkpoints(config_from_keys(keys))


def test_every_layout_names_the_same_draft(target: Path, tmp_path: Path) -> None:
    writers = {
        "z-lab": (write_z_lab, DFlashSizes()),
        "speculators": (write_speculators, DFlashSizes()),
        "DeepSpec": (write_deepspec, DSPARK),
        "speculators' DSpark": (write_speculators, DSPARK),
    }
    found = {}
    for name, (write, sizes) in writers.items():
        directory = write(tmp_path / name, sizes)
        look_at(target, directory)
        found[name] = replace(DFlashInfo.from_directory(directory), layer=None)
    expected = DFlashInfo(
        None, (Sight(None, False),) * 2, 64, checkpoints.VOCAB, (1, 3), 8, 35, False, 0, None
    )
    assert found["z-lab"] == found["speculators"] == expected
    spark = replace(expected, samples_from_newest=True, markov_rank=16)
    assert found["DeepSpec"] == found["speculators' DSpark"] == spark
    assert (expected.max_drafted, spark.max_drafted) == (7, 8)


@pytest.mark.parametrize(
    ("keys", "sights"),
    [
        ({"dflash_config": {"causal": True}}, [(None, True), (None, True)]),
        ({"is_causal": True}, [(None, True), (None, True)]),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24},
            [(24, True), (None, False)],
        ),
        (
            {"layer_types": None, "dflash_config": {"use_swa": True, "swa_window_size": 16}},
            [(16, False), (16, False)],
        ),
    ],
)
def test_what_a_layer_sees_is_read_as_published_drafts_state_it(
    tmp_path: Path, keys: dict[str, Any], sights: list[tuple[int | None, bool]]
) -> None:
    own = {"mask_token_id": 35, "target_layer_ids": [0, 2]} | keys.pop("dflash_config", {})
    directory = write_z_lab(tmp_path / "draft", DFlashSizes(), dflash_config=own, **keys)
    found = DFlashInfo.from_directory(directory).sights
    assert [(sight.window, sight.is_causal) for sight in found] == sights


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"conv_kernel_size": 3}, "is a DFlash 2 draft, which convolves over its block"),
        ({"model_type": "gemma4"}, "has layers of gemma4 instead of llama or qwen3"),
        ({"hidden_act": "gelu"}, "has the activation gelu instead of silu"),
        ({"output_multiplier": 0.5}, "has output_multiplier 0.5"),
        ({"final_logit_softcapping": 30.0}, "caps its logits"),
        ({"markov_rank": 8, "markov_head_type": "gated"}, "has a Markov head of the kind gated"),
        ({"projector_type": "domino"}, "has a head of the kind domino"),
        ({"speculators_model_type": "dflash2"}, "is a draft of the kind dflash2"),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, "has no mask_token_id"),
        (
            {"dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 289}},
            "has 289 as mask_token_id, which is no id of its vocabulary of 289",
        ),
        (
            {"dflash_config": {"target_layer_ids": [0, 4], "mask_token_id": 35}},
            "it reads the inputs of layers 1, 5, and the target has 4 layers",
        ),
        ({"dflash_config": {"mask_token_id": 35}}, "is no config of a DFlash draft"),
        ({"vocab_size": 200}, "it expects a vocabulary of 200, and the target has 289"),
        ({"target_hidden_size": 32}, "it expects hidden states of 32, and the target has 64"),
        ({"layer_types": ["full_attention"]}, "must be equal to the number of `layer_types` (1)"),
        ({"intermediate_size": 128}, "mlp.gate_proj.weight"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_draft_that_is_not_computed_here_is_refused_in_one_sentence(
    target: Path, tmp_path: Path, keys: dict[str, Any], named: str
) -> None:
    if "speculators_model_type" in keys:
        draft = write_speculators(tmp_path / "draft", DFlashSizes(), **keys)
    else:
        draft = write_z_lab(tmp_path / "draft", DFlashSizes(), **keys)
    with pytest.raises(SpecserveError) as refused:
        look_at(target, draft)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_files_that_contradict_their_config_are_refused(target: Path, tmp_path: Path) -> None:
    draft = write_speculators(tmp_path / "draft", replace(DSPARK, draft_vocab_size=120))
    file = draft / "model.safetensors"
    whole = load_file(file)
    for change, named in (
        ({"fc.weight": torch.zeros(64, 64)}, "fc.weight of the DFlash draft"),
        ({"mask_embedding": torch.zeros(64)}, "has an embedding of its own for the mask"),
        ({"markov_head.markov_w2.weight": None}, "has no tensor markov_head.markov_w2.weight"),
        ({"d2t": None}, "has no tensor d2t"),
    ):
        tensors = {name: one for name, one in (whole | change).items() if one is not None}
        save_file(tensors, file)
        with pytest.raises(SpecserveError, match=named):
            look_at(target, draft)
    save_file(whole | {"d2t": torch.full((120,), 400)}, file)
    weights = DFlashWeights(draft, DFlashInfo.from_directory(draft))
    with pytest.raises(ModelError, match="does not map its tokens to 289 ids"):
        weights.target_ids()


def test_a_draft_of_ours_is_refused_for_another_target_of_the_same_sizes(
    target: Path, tmp_path: Path
) -> None:
    draft = write_z_lab(tmp_path / "draft", DFlashSizes(), target_fingerprint="another")
    with pytest.raises(ModelError, match="was trained for another target"):
        look_at(target, draft)


def test_a_folder_without_a_draft_is_named(target: Path, tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    with pytest.raises(ModelNotFound):
        look_at(target, tmp_path / "draft")
    (tmp_path / "draft" / "config.json").write_text(json.dumps([]))
    with pytest.raises(SpecserveError):
        look_at(target, tmp_path / "draft")


def test_a_draft_needs_a_path() -> None:
    with pytest.raises(ConfigError, match=r"draft\.kind dflash needs draft.path"):
        config_from_keys({"target.path": "t", "draft.kind": "dflash"})
