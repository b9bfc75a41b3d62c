"""EAGLE-3 heads: both published layouts are opened, and heads of other targets are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specserve import LLM, Sampling
from specserve.config.tree import config_from_keys
from specserve.errors import ConfigError, ModelError, ModelNotFound, UnsupportedModel
from specserve.features.eagle.checkpoint import EagleWeights, require_eagle_for
from specserve.features.eagle.head_config import EagleInfo
from specserve.models.checkpoints.weights import fingerprint
from tests.support import checkpoints
from tests.support.eagle_heads import HeadSizes, write_specforge, write_speculators

SIZES = HeadSizes(vocab_size=checkpoints.VOCAB)
KEYS: dict[str, Any] = {
    "target.dtype": "float32",
    "target.threads": 1,
    "draft.dtype": "float32",
    "draft.kind": "eagle",
    "cache.pages": 60,
    "speculation.gamma": 3,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = checkpoints.CONFIGS["llama"]()
    config.num_hidden_layers = 6
    checkpoint = checkpoints.write(config, tmp_path_factory.mktemp("llama") / "target")
    checkpoints.add_tokenizer(checkpoint)
    return checkpoint


@pytest.mark.parametrize("write", [write_specforge, write_speculators])
def test_a_published_head_drafts_and_leaves_the_text_the_targets_own(
    target: Path, tmp_path: Path, write: Any
) -> None:
    head = write(tmp_path / "head", SIZES)
    prompts = [tuple(range(20, 60)), tuple(range(90, 99))]
    wanted = Sampling(max_tokens=24, temperature=0, ignore_eos=True)
    with LLM(target, **KEYS | {"draft.kind": "none"}) as plain:
        expected = [output.token_ids for output in plain.generate(prompts, wanted)]
    with LLM(target, **KEYS | {"draft.path": str(head)}) as llm:
        outputs = llm.generate(prompts, wanted)
    assert [output.token_ids for output in outputs] == expected
    assert all(output.stats and output.stats.drafted for output in outputs)


@pytest.mark.parametrize("write", [write_specforge, write_speculators])
def test_both_layouts_name_the_same_head(tmp_path: Path, write: Any) -> None:
    info = EagleInfo.from_directory(write(tmp_path / "head", SIZES))
    assert info.taps(6) == (1, 2, 3)
    assert (info.target_hidden_size, info.vocab_size) == (64, checkpoints.VOCAB)
    assert not info.norm_before_residual
    ids = EagleWeights(tmp_path / "head", info).target_ids()
    assert ids is not None
    known = load_file(tmp_path / "head" / "model.safetensors")["t2d"].nonzero()[:, 0]
    assert torch.equal(ids, known), "d2t holds offsets, not ids"


@pytest.mark.parametrize("write", [write_specforge, write_speculators])
def test_a_config_that_names_no_layers_means_the_usual_ones(tmp_path: Path, write: Any) -> None:
    info = EagleInfo.from_directory(write(tmp_path / "head", replace(SIZES, taps=None)))
    assert info.taps(32) == (2, 16, 29)


def refuse_to_open(*_: object, **__: object) -> None:
    pytest.fail("weights were read before the mistake was found")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (replace(SIZES, target_hidden_size=128), "hidden states of 128, and the target has 64"),
        (replace(SIZES, vocab_size=999), "a vocabulary of 999, and the target has 289"),
        (replace(SIZES, taps=(1, 2, 7)), "inputs of layers 1, 2, 7, and the target has 6 layers"),
        (replace(SIZES, taps=(1, 2)), "inputs of layers 1, 2, and"),
        (replace(SIZES, hidden_size=32, has_embedding=False), "has no embedding of its own"),
    ],
    ids=["hidden size", "vocabulary", "layers", "two layers", "embedding"],
)
def test_a_head_of_another_target_is_refused_before_weights_are_read(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: HeadSizes,
    message: str,
) -> None:
    monkeypatch.setattr("specserve.llm.inprocess.open_target", refuse_to_open)
    monkeypatch.setattr("specserve.features.eagle.checkpoint.EagleWeights.read", refuse_to_open)
    head = write_speculators(tmp_path / "head", sizes)
    with pytest.raises(ModelError, match=message):
        LLM(target, **KEYS | {"draft.path": str(head)})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"speculators_model_type": "mtp"}, "a draft of the kind mtp"),
        ({"num_hidden_layers": 0}, "has no layer"),
        ({"model_type": "deepseek_v3"}, "a layer of deepseek_v3"),
        ({"hidden_act": "gelu"}, "the activation gelu"),
        ({"fc_norm": True}, "norms of a later variant"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "one hidden state instead of three"),
    ],
    ids=["another kind", "no layer", "latent attention", "activation", "norms", "EAGLE 1"],
)
def test_a_head_that_is_computed_otherwise_is_refused(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    head = write_specforge(tmp_path / "head", SIZES, **keys)
    with pytest.raises(UnsupportedModel, match=message):
        EagleInfo.from_directory(head)


@pytest.mark.parametrize(
    ("write", "keys"),
    [
        (write_speculators, {}),
        (write_specforge, {}),
        (write_specforge, {"architectures": ["PEagleDraftModel"], "num_hidden_layers": 2}),
        (write_specforge, {"ptd_token_id": None, "pard_token": 5}),
        (
            write_specforge,
            {"ptd_token_id": None, "parallel_drafting": True, "mask_token_id": "5"},
        ),
    ],
    ids=["speculators", "ptd_token_id", "architecture", "pard_token", "mask_token_id"],
)
def test_a_parallel_head_names_its_mask_in_every_published_way(
    target: Path, tmp_path: Path, write: Any, keys: dict[str, Any]
) -> None:
    head = write(tmp_path / "head", replace(SIZES, num_layers=2, mask_token=5), **keys)
    info = require_eagle_for(target, head)
    assert (info.mask_token, info.num_layers) == (5, 2)


@pytest.mark.parametrize("write", [write_specforge, write_speculators])
def test_a_parallel_head_drafts_and_leaves_the_text_the_targets_own(
    target: Path, tmp_path: Path, write: Any
) -> None:
    head = write(tmp_path / "head", replace(SIZES, num_layers=4, mask_token=5))
    prompts = [tuple(range(20, 60)), tuple(range(90, 99))]
    wanted = Sampling(max_tokens=24, temperature=0, ignore_eos=True)
    with LLM(target, **KEYS | {"draft.kind": "none"}) as plain:
        expected = [output.token_ids for output in plain.generate(prompts, wanted)]
    with LLM(target, **KEYS | {"draft.path": str(head)}) as llm:
        outputs = llm.generate(prompts, wanted)
    assert [output.token_ids for output in outputs] == expected
    assert all(output.stats and output.stats.drafted for output in outputs)


@pytest.mark.parametrize(
    ("keys", "changes", "message"),
    [
        ({"ptd_token_id": None}, {}, "without a mask token; add .* mask_token_id or ptd_token_id"),
        ({"ptd_token_id": 289}, {}, "has 289 as ptd_token_id .* no id of its vocabulary of 289"),
        ({}, {"mask_hidden": torch.zeros(1, 64)}, "mask_hidden .* is 1 x 64, .* implies 1 x 192"),
        ({}, {"mask_hidden": None}, "has no tensor mask_hidden"),
        ({"num_hidden_layers": 3}, {}, "has no tensor layers.2.self_attn.q_proj.weight"),
    ],
    ids=["no mask token", "not of the vocabulary", "hidden size", "no mask_hidden", "layers"],
)
def test_a_parallel_head_whose_files_do_not_fit_is_refused_in_one_sentence(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keys: dict[str, Any],
    changes: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr("specserve.llm.inprocess.open_target", refuse_to_open)
    head = write_specforge(tmp_path / "head", replace(SIZES, num_layers=2, mask_token=5), **keys)
    weights: dict[str, Any] = load_file(head / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, head / "model.safetensors")
    with pytest.raises(ModelError, match=message) as found:
        LLM(target, **KEYS | {"draft.path": str(head)})
    assert "\n" not in str(found.value)


def test_files_that_contradict_their_config_are_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no EAGLE-3 head"):
        EagleInfo.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="is no config of an EAGLE-3 head"):
        EagleInfo.from_directory(tmp_path)
    head = write_specforge(tmp_path / "head", SIZES)
    weights = load_file(head / "model.safetensors")
    for name, tensor, message in (
        ("fc.weight", torch.zeros(64, 64), "fc.weight .* is 64 x 64, .* 64 x 192"),
        ("d2t", weights["d2t"].fill_(400), "does not map"),
        ("midlayer.mlp.up_proj.weight", None, "no tensor layers.0.mlp.up_proj.weight"),
    ):
        changed = {key: value for key, value in weights.items() if key != name}
        if tensor is not None:
            changed[name] = tensor
        save_file(changed, head / "model.safetensors")
        with pytest.raises(ModelError, match=message):
            EagleWeights(head, EagleInfo.from_directory(head)).target_ids()


def test_a_head_of_ours_is_refused_for_another_target_of_the_same_sizes(
    target: Path, tmp_path: Path
) -> None:
    own = write_specforge(
        tmp_path / "head", SIZES, target_fingerprint=fingerprint(target), torch_dtype="float32"
    )
    assert require_eagle_for(target, own).target == fingerprint(target)
    other = checkpoints.perturb(target, tmp_path / "other", 0.1)
    with pytest.raises(ModelError, match="trained for another target"):
        require_eagle_for(other, own)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"target.path": "another"}, r"draft\.path.*specserve eagle"),
        (
            {"draft.path": "head", "draft.placement": "together", "draft.num_gpus": 1},
            r"draft\.num_gpus",
        ),
    ],
    ids=["no path", "together with a device of its own"],
)
def test_keys_that_a_head_cannot_use_are_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config_from_keys({"draft.kind": "eagle", **keys})


def test_an_encoder_decoder_has_no_head(tmp_path: Path) -> None:
    t5 = checkpoints.write(checkpoints.ENCODER_DECODERS["t5"](), tmp_path / "t5")
    checkpoints.add_tokenizer(t5, ends=True)
    head = write_specforge(tmp_path / "head", SIZES)
    with pytest.raises(UnsupportedModel, match="decoder-only"):
        LLM(t5, **KEYS | {"draft.path": str(head)})


def test_the_config_that_transformers_would_not_take_is_an_error(tmp_path: Path) -> None:
    head = write_specforge(tmp_path / "head", SIZES, num_attention_heads="four")
    with pytest.raises(ModelError):
        EagleInfo.from_directory(head)
    keys = json.loads((head / "config.json").read_text())
    assert keys["num_attention_heads"] == "four"
