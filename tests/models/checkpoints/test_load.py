"""Loading a checkpoint, whole or in part; what cannot run is refused in one sentence."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    DeepseekV3Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPTJConfig,
    JambaConfig,
    LlamaConfig,
    PreTrainedConfig,
)

from specserve.checkpoint_files import find_checkpoints
from specserve.config.tree import config_from_keys
from specserve.errors import ModelError, ModelNotFound, UnsupportedModel
from specserve.models.checkpoints.find import find_checkpoint
from specserve.models.checkpoints.library import read_config, register_attention
from specserve.models.checkpoints.load import load_model
from specserve.models.shard import Shard
from tests.support import checkpoints

IDS = torch.arange(3, 23)[None]
QUANTIZED: dict[str, Any] = {"quantization_config": {"quant_method": "hqq"}}
WHOLE_OR_SHARE = pytest.mark.parametrize("shard", [None, Shard(0, 2)], ids=["whole", "share"])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("llama"))


def load(directory: Path, *, shard: Shard | None = None, **options: Any) -> Any:
    return load_model(
        directory, **{"dtype": torch.float32, "device": "cpu", "shard": shard, **options}
    )


def copy_checkpoint(source: Path, target: Path, **changes: Tensor | None) -> Path:
    """Return a copy of a checkpoint of one file with some tensors changed, or left out where None.

    `__` in a key stands for a dot.
    """
    target.mkdir(exist_ok=True)
    weights = {
        **load_file(source / "model.safetensors"),
        **{name.replace("__", "."): tensor for name, tensor in changes.items()},
    }
    save_file(
        {name: tensor for name, tensor in weights.items() if tensor is not None},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    (target / "config.json").write_text((source / "config.json").read_text())
    return target


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def test_a_loaded_model_computes_what_the_library_computes(llama: Path) -> None:
    loaded = load(llama)
    reference = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    assert not loaded.module.training
    assert not any(parameter.requires_grad for parameter in loaded.module.parameters())
    assert torch.equal(loaded.module(IDS).logits, reference(IDS).logits)


@WHOLE_OR_SHARE
def test_several_files_give_the_same_weights_as_one(
    shard: Shard | None, llama: Path, tmp_path: Path
) -> None:
    checkpoints.make("llama", tmp_path, shard_bytes=100_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert same_weights(load(tmp_path, shard=shard).module, load(llama, shard=shard).module)


@WHOLE_OR_SHARE
def test_weights_are_cast_to_the_asked_dtype(shard: Shard | None, llama: Path) -> None:
    loaded = load(llama, shard=shard, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {torch.bfloat16}
    inv_freq = loaded.module.model.rotary_emb.inv_freq
    assert inv_freq.dtype == torch.float32
    assert inv_freq.device.type == "cpu"


@WHOLE_OR_SHARE
def test_loading_prints_nothing(
    shard: Shard | None, llama: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    load(llama, shard=shard)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", checkpoints.ARCHITECTURES)
def test_the_spec_says_what_the_attention_function_is_given(name: str, tmp_path: Path) -> None:
    assert_spec_holds(checkpoints.make(name, tmp_path))


def test_the_spec_knows_keys_wider_than_values(tmp_path: Path) -> None:
    latent: dict[str, Any] = {
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
    }
    experts: dict[str, Any] = {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    config = DeepseekV3Config(
        **{**checkpoints.SIZES, **latent, **experts, "num_key_value_heads": 4}
    )
    spec = assert_spec_holds(checkpoints.write(config, tmp_path))
    assert (spec.head_dim, spec.v_head_dim) == (24, 12)


def assert_spec_holds(directory: Path) -> Any:
    shapes: list[tuple[torch.Size, ...]] = []

    def probe(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, None]:
        shapes.append((query.shape, key.shape, value.shape))
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    register_attention("probe", probe)
    loaded = load(directory, attention="probe")
    with torch.inference_mode():
        logits = loaded.module(
            input_ids=IDS, position_ids=torch.arange(20)[None], use_cache=False
        ).logits
    spec, rows = loaded.spec, IDS.shape[1]
    query, key = (1, spec.num_heads, rows, spec.head_dim), (1, spec.kv_heads, rows, spec.head_dim)
    assert shapes == [(query, key, (1, spec.kv_heads, rows, spec.v_head_dim))] * spec.num_layers
    assert logits.shape == (1, rows, spec.vocab_size)
    assert spec.max_context == checkpoints.CONTEXT
    assert spec.tied == (
        loaded.module.get_output_embeddings().weight is loaded.module.get_input_embeddings().weight
    )
    return spec


def test_end_ids_come_from_generation_config_before_config(llama: Path, tmp_path: Path) -> None:
    directory = copy_checkpoint(llama, tmp_path)
    assert load(directory).spec.end_ids == {checkpoints.EOS}
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load(directory).spec.end_ids == {7, 9}
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 1}))
    assert load(directory).spec.end_ids == {checkpoints.EOS}


@WHOLE_OR_SHARE
def test_a_tensor_that_is_missing_is_named(
    shard: Shard | None, llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ModelError, match=r"lacks the tensors model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        load(
            copy_checkpoint(llama, tmp_path, model__layers__1__mlp__up_proj__weight=None),
            shard=shard,
        )


@WHOLE_OR_SHARE
def test_a_tied_head_is_not_missing_and_an_untied_one_is(
    shard: Shard | None, llama: Path, tmp_path: Path
) -> None:
    directory = copy_checkpoint(llama, tmp_path, lm_head__weight=None)
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        load(directory, shard=shard)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert load(directory, shard=shard).spec.tied


@WHOLE_OR_SHARE
def test_a_tensor_too_many_is_named(shard: Shard | None, llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"beside the model's, the tensors adapter\.weight"):
        load(copy_checkpoint(llama, tmp_path, adapter__weight=torch.ones(2)), shard=shard)


@WHOLE_OR_SHARE
def test_buffers_of_older_checkpoints_are_no_error(
    shard: Shard | None, llama: Path, tmp_path: Path
) -> None:
    old = {
        f"model__layers__{layer}__self_attn__rotary_emb__inv_freq": torch.ones(8)
        for layer in range(2)
    }
    assert same_weights(
        load(copy_checkpoint(llama, tmp_path, **old), shard=shard).module,
        load(llama, shard=shard).module,
    )


@WHOLE_OR_SHARE
def test_a_tensor_of_another_shape_is_refused(
    shard: Shard | None, llama: Path, tmp_path: Path
) -> None:
    shapes = r"o_proj\.weight in another shape, \[64, \d+\], than config.json implies, \[64, \d+\]"
    with pytest.raises(ModelError, match=shapes):
        load(
            copy_checkpoint(
                llama, tmp_path, model__layers__0__self_attn__o_proj__weight=torch.ones(64, 20)
            ),
            shard=shard,
        )


@WHOLE_OR_SHARE
@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.int32, "I32"), (torch.int8, "I8"), (torch.complex64, "C64")]
)
def test_weights_that_are_no_floating_point_numbers_are_refused_by_name(
    shard: Shard | None, dtype: torch.dtype, name: str, llama: Path, tmp_path: Path
) -> None:
    weight = torch.ones(64, 64).to(dtype)
    directory = copy_checkpoint(llama, tmp_path, model__layers__0__self_attn__q_proj__weight=weight)
    with pytest.raises(ModelError, match=rf"q_proj\.weight in {name}, and weights are floating"):
        load(directory, shard=shard)


@pytest.mark.parametrize("token", [checkpoints.VOCAB, -1])
def test_an_end_token_outside_the_vocabulary_is_refused_before_weights_are_read(
    token: int, llama: Path, tmp_path: Path
) -> None:
    directory = copy_checkpoint(llama, tmp_path)
    (directory / "model.safetensors").write_bytes(b"")
    stated = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(stated | {"eos_token_id": token}))
    with pytest.raises(UnsupportedModel, match=f"eos_token_id {token} in config.json, and its voc"):
        load(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, token]}))
    with pytest.raises(UnsupportedModel, match=f"eos_token_id {token} in generation_config.json"):
        load(directory)


@WHOLE_OR_SHARE
def test_a_truncated_file_is_refused(shard: Shard | None, llama: Path, tmp_path: Path) -> None:
    directory = copy_checkpoint(llama, tmp_path)
    content = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match=str(directory)):
        load(directory, shard=shard)


UNEVEN: dict[str, Any] = {"attention_k_eq_v": True, "num_global_key_value_heads": 3}
"""Of a Gemma 4 with three key and value heads in some layers, and four in others."""


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            BartConfig(),
            "no decoder-only language model, nor an encoder-decoder of the kinds mt5, t5",
        ),
        (BertConfig(architectures=["BertForMaskedLM"]), "no decoder-only language model"),
        (Gemma3TextConfig(use_bidirectional_attention=True), "no decoder-only language model"),
        (Gemma4TextConfig(**UNEVEN), "differ in their sizes"),
        (Gemma3nTextConfig(), "share keys and values"),
        (JambaConfig(), "not plain attention"),
        (LlamaConfig(**QUANTIZED), "quantized"),
    ],
)
def test_architectures_that_cannot_run_are_refused(
    config: PreTrainedConfig, why: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=why):
        read_config(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"[1, 2]", "is a list, and it must be an object"),
        (b"null", "is null, and it must be an object"),
        (b'{"a": "\xff"}', "is no UTF-8: .* byte 0xff in position 7"),
        (b'{"a": ', "is no JSON: .*char 6"),
    ],
)
def test_a_file_that_is_no_json_object_is_named_with_the_reason(
    name: str, content: bytes, why: str, llama: Path, tmp_path: Path
) -> None:
    directory = copy_checkpoint(llama, tmp_path)
    (directory / name).write_bytes(content)
    with pytest.raises(UnsupportedModel, match=f": {name} {why}"):
        find_checkpoints(config_from_keys({"target.path": str(directory), "draft.kind": "none"}))


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"num_attention_heads": 0}, "has num_attention_heads '0' in config.json"),
        ({"num_attention_heads": 3}, "not a multiple of the number of attention heads"),
        ({"rms_norm_eps": "x"}, "Field 'rms_norm_eps' expected float"),
    ],
)
def test_a_value_that_the_library_cannot_take_is_named_with_the_reason(
    values: dict[str, object], why: str, llama: Path, tmp_path: Path
) -> None:
    directory = copy_checkpoint(llama, tmp_path)
    stated = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(stated | values))
    with pytest.raises(UnsupportedModel, match=why):
        find_checkpoints(config_from_keys({"target.path": str(directory), "draft.kind": "none"}))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": "no_such_model"}'])
def test_a_config_that_says_nothing_sensible_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match="cannot be read as a model"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 2**31),
        ("hidden_size", -64),
        ("num_key_value_heads", 0),
        ("head_dim", 2**40),
        ("vocab_size", 10**30),
        ("max_position_embeddings", 2**40),
        ("hidden_act", {}),
        ("architectures", [[]]),
        ("eos_token_id", "x"),
    ],
)
def test_an_absurd_value_of_a_config_is_refused_before_anything_is_built(
    name: str, value: object, tmp_path: Path
) -> None:
    checkpoints.CONFIGS["llama"]().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
    with pytest.raises(UnsupportedModel, match=f"{name}|cannot be read"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [("num_hidden_layers", 900, "900 layers"), ("intermediate_size", 2**20, "parameters by its")],
)
def test_a_config_that_implies_more_than_the_files_hold_allocates_nothing(
    name: str, value: int, why: str, tmp_path: Path
) -> None:
    checkpoints.make("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
    with pytest.raises(ModelError, match=why):
        load_model(tmp_path, dtype=torch.float32, device="cpu")


def test_an_attention_that_the_model_does_not_support_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="scaled_dot_product_attention"):
        load(checkpoints.make("gpt_oss", tmp_path), attention="sdpa")


def test_a_model_that_would_ignore_our_attention_is_refused(tmp_path: Path) -> None:
    GPTJConfig().save_pretrained(tmp_path)
    register_attention("probe", lambda *_, **__: None)
    with pytest.raises(UnsupportedModel, match="computes its attention itself"):
        load(tmp_path, attention="probe")


def test_a_local_directory_is_found(llama: Path) -> None:
    assert find_checkpoint(str(llama)) == llama


def test_a_path_that_does_not_exist_is_not_taken_for_a_hub_name(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere does not exist"):
        find_checkpoint(tmp_path / "nowhere")


def test_a_file_is_no_model(llama: Path) -> None:
    with pytest.raises(ModelNotFound, match="is a file"):
        find_checkpoint(llama / "config.json")


def test_a_directory_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        find_checkpoint(tmp_path)


def test_pickled_weights_are_refused(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    with pytest.raises(ModelError, match="holds no weights"):
        find_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="safetensors only"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["someone/no-such-model", "no such name", "a//b"])
def test_a_hub_name_that_cannot_be_had_is_refused_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*args: object) -> None:
        raise AssertionError(f"it connects: {args}")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(time, "sleep", connect)
    with pytest.raises(ModelNotFound) as refusal:
        find_checkpoint(name, revision="main")
    assert name in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_hub_model_is_downloaded_without_pickles(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request: dict[str, Any] = {}

    def snapshot_download(name: str, **options: Any) -> str:
        request.update(options, name=name)
        return str(llama)

    monkeypatch.setattr("specserve.models.checkpoints.find.snapshot_download", snapshot_download)
    assert find_checkpoint("someone/model", revision="v2") == llama
    assert (request["name"], request["revision"]) == ("someone/model", "v2")
    assert not any("bin" in pattern for pattern in request["allow_patterns"])


def test_a_perturbed_copy_agrees_in_part(llama: Path, tmp_path: Path) -> None:
    ids = torch.randint(3, checkpoints.VOCAB, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours = load(llama).module(ids).logits.argmax(-1)
        theirs = (
            load(checkpoints.perturb(llama, tmp_path / "draft", 0.03)).module(ids).logits.argmax(-1)
        )
    assert 0.3 < (ours == theirs).float().mean() < 0.95


def test_the_test_tokenizer_is_one_token_a_byte(llama: Path, tmp_path: Path) -> None:
    tokenizer = checkpoints.add_tokenizer(copy_checkpoint(llama, tmp_path))
    assert tokenizer.decode(tokenizer.encode("naïve\n 日本 🙂")) == "naïve\n 日本 🙂"
    assert max(tokenizer.get_vocab().values()) < checkpoints.VOCAB
