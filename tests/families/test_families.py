"""The page of families says what holds, and what cannot run is refused by name before weights."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, FalconConfig, Gemma4TextConfig, Llama4TextConfig

from specserve.api.tokenizer import Tokenizer
from specserve.errors import ModelError, UnsupportedModel
from specserve.models.checkpoints.architecture import longest_context
from specserve.models.checkpoints.decoders import REFUSED
from specserve.models.checkpoints.library import read_config
from specserve.models.checkpoints.load import load_model
from specserve.models.checkpoints.weights import num_stored_parameters
from tests.families.check import (
    check,
    is_close,
    logits,
    open_runner,
    ranks_write_the_library_s_texts,
)
from tests.families.configs import FAMILIES, MULTIMODAL
from tests.families.make import write
from tests.families.page import line
from tests.support import checkpoints

PAGE = Path("docs/measurements/families.md")
OLDER = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
UNUSED = "language_model.layers.3.self_attn.k_proj"
EVERY = [
    *FAMILIES,
    *MULTIMODAL,
    # Other tests of the gate cover these.
    *(pytest.param(name, marks=pytest.mark.long) for name in checkpoints.ARCHITECTURES),
]


@pytest.mark.parametrize("name", EVERY)
def test_the_page_says_what_holds_for_a_family(one_thread: None, name: str, tmp_path: Path) -> None:
    row = check(name, tmp_path)
    assert row.opens
    assert row.greedy
    assert row.invariant
    assert line(name, row) in PAGE.read_text(encoding="utf-8").splitlines()


def test_the_page_has_each_family_and_each_refusal() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in (*checkpoints.ARCHITECTURES, *FAMILIES, *MULTIMODAL):
        assert text.count(f"\n| `{name}` |") == 1
    for kind, reason in REFUSED.items():
        assert f"`{kind}`" in text
        assert f"| {reason} |" in text


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_run_is_refused_by_name_and_reason(kind: str, tmp_path: Path) -> None:
    CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel) as refusal:
        read_config(tmp_path)
    assert str(refusal.value) == f"{kind} models cannot be served: {REFUSED[kind]}"


@pytest.mark.parametrize(
    ("name", "size", "gathers"),
    [
        ("falcon_7b", 2, False),
        ("falcon_7b", 2, True),
        ("falcon_7b", 4, False),  # which repeats its key and value head
        ("falcon_40b", 2, False),
        ("falcon_40b", 2, True),
        ("falcon_per_head", 4, False),
        ("stablelm", 2, False),
        ("stablelm_parallel", 2, True),
        ("stablelm_parallel", 4, False),  # which repeats key and value heads, and their norms
        ("granitemoe", 2, False),
        ("deepseek_v2", 2, False),
        ("deepseek_v3", 2, False),
        ("deepseek_v3", 4, False),
    ],
)
def test_ranks_write_the_texts_of_the_library(
    one_thread: None, name: str, size: int, gathers: bool, tmp_path: Path
) -> None:
    directory = write(name, tmp_path)
    assert ranks_write_the_library_s_texts(directory, size, gathers=gathers)


def test_a_falcon_with_alibi_is_refused(tmp_path: Path) -> None:
    FalconConfig(alibi=True).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"this falcon model cannot be served: .*alibi"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", ["falcon_7b", "gemma4"])
def test_a_model_that_needs_all_its_layers_is_refused_without_some(
    name: str, tmp_path: Path
) -> None:
    write(name, tmp_path)
    with pytest.raises(UnsupportedModel, match="cannot leave layers out"):
        load_model(tmp_path, dtype=torch.float32, device="cpu", skip=(1,))


def test_a_gemma_4_that_sees_ahead_is_refused(tmp_path: Path) -> None:
    Gemma4TextConfig(use_bidirectional_attention="all").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="is no decoder-only language model"):
        read_config(tmp_path)


def test_a_gemma_4_may_hold_keys_that_its_layers_share_with_others(tmp_path: Path) -> None:
    """Released files have key and value projections for layers that use other layers'."""
    directory = write("gemma4_image_text", tmp_path / "plain")

    def add(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        return name.replace("embed_vision.embedding_projection", UNUSED), tensor

    released = change(directory, tmp_path / "released", add)
    assert f"{UNUSED}.weight" in str(load_file(released / "model.safetensors").keys())
    assert is_close(logits(open_runner(released)), logits(open_runner(directory)), 0.0)


def test_a_llama_4_ends_before_its_layers_attend_in_chunks_or_scale_queries() -> None:
    assert longest_context(Llama4TextConfig()) == 8191
    assert longest_context(Llama4TextConfig(attention_chunk_size=100)) == 100
    assert longest_context(Llama4TextConfig(attn_temperature_tuning=False)) == 8192


# Text parts of multimodal models


@pytest.fixture(scope="module")
def image_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("qwen3_vl", tmp_path_factory.mktemp("image_text") / "qwen3_vl")


def change(directory: Path, out: Path, rename: Any) -> Path:
    """Write a copy whose tensors have other names and contents, as `rename` yields them."""
    out.mkdir()
    tensors = load_file(directory / "model.safetensors")
    save_file(
        dict(rename(name, tensor) for name, tensor in tensors.items()),
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    (out / "config.json").write_text((directory / "config.json").read_text())
    return out


def test_what_sees_images_is_neither_read_nor_counted_and_the_log_says_so(
    image_text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = change(
        image_text,
        tmp_path / "broken",
        lambda name, tensor: (name, torch.zeros(1) if ".visual." in name else tensor),
    )
    assert is_close(logits(open_runner(broken)), logits(open_runner(image_text)), 0.0)
    assert num_stored_parameters(broken) == num_stored_parameters(image_text)
    assert "what sees images or hears is left out" in caplog.text
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_names_of_earlier_versions_of_the_library_are_the_same_model(
    image_text: Path, tmp_path: Path
) -> None:
    def older(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        for prefix, other in OLDER.items():
            if name.startswith(prefix):
                return other + name.removeprefix(prefix), tensor
        return name.removeprefix("model."), tensor

    renamed = change(image_text, tmp_path / "older", older)
    assert is_close(logits(open_runner(renamed)), logits(open_runner(image_text)), 0.0)


def test_a_tensor_that_is_neither_text_nor_sight_is_named(image_text: Path, tmp_path: Path) -> None:
    added = change(
        image_text,
        tmp_path / "added",
        lambda name, tensor: ("model.odd.weight" if "visual.pos_embed" in name else name, tensor),
    )
    with pytest.raises(
        ModelError, match=r"has, beside the model's, the tensors model\.odd\.weight"
    ):
        open_runner(added)


def test_the_end_token_may_be_stated_for_the_whole_model_alone(
    image_text: Path, tmp_path: Path
) -> None:
    config = json.loads((image_text / "config.json").read_text())
    del config["text_config"]["eos_token_id"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": 77}))
    assert read_config(tmp_path).eos_token_id == 77


def test_the_chat_template_may_lie_beside_the_tokenizer(image_text: Path, tmp_path: Path) -> None:
    """Released image-text models have it in a file of their processor."""
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    (tmp_path / "config.json").write_text((image_text / "config.json").read_text())
    checkpoints.add_tokenizer(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = Tokenizer.load(tmp_path)
    messages = [{"role": "user", "content": "What is this?"}]
    assert tokenizer.decode(tokenizer.apply_chat_template(messages)) == "<user>What is this?"
