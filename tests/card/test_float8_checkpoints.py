"""FP8 checkpoints on emulated cards: kept as they are, and multiplied as their format says."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specserve.config.tree import DEMO, config_from_keys
from specserve.demo.corpus import held_out_prompts
from specserve.errors import TooLittleMemory, UnsupportedModel
from specserve.llm.llm import LLM
from specserve.models.checkpoints.held_bytes import num_held_bytes
from specserve.models.checkpoints.load import load_model
from specserve.models.checkpoints.quantize import write_quantized
from specserve.models.checkpoints.weights import Codes, num_weight_bytes
from specserve.models.float8_weight import FLOAT8, Float8Weight, float8_of, join_float8
from specserve.models.gpu.float8_kernels import ROWS
from specserve.models.layers import Float8Linear
from specserve.models.model import ModelOptions, open_model
from specserve.models.shard import Shard
from specserve.sampling_params import Sampling
from specserve.tools.doctor import room
from specserve.types import Step
from tests.formats.check import MADE
from tests.support import checkpoints
from tests.support.card import Ledger, emulated_cards
from tests.support.card.ranks import card_ranks

CARD = torch.device("cuda", 0)
TEXT = tuple(range(20, 80))
INPUTS = {"num_bits": 8, "type": "float", "symmetric": True}
BY_ROWS = {**INPUTS, "strategy": "token", "dynamic": True}
CUT_OFF = 2.0
PRODUCTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@pytest.fixture
def card() -> Iterator[Ledger]:
    with emulated_cards() as ledger:
        yield ledger


@dataclass(frozen=True, slots=True)
class Kind:
    """A tiny checkpoint that compressed-tensors made, and what its config is changed to."""

    made: str
    stated: Mapping[str, Any] | None
    is_static: bool = False
    largest: float = math.inf


KINDS = {
    "dynamic": Kind("fp8-dynamic", None),
    "static": Kind("fp8-static", None, is_static=True),
    "fbgemm": Kind(
        "fp8-dynamic",
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": CUT_OFF},
        largest=CUT_OFF,
    ),
    "fp8 dynamic": Kind("fp8-static", {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8 static": Kind(
        "fp8-static", {"quant_method": "fp8", "activation_scheme": "static"}, is_static=True
    ),
}


def write(kind: Kind, directory: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """Copy a tiny checkpoint with another quantization_config, and with changed tensors."""
    directory.mkdir()
    config = json.loads((MADE / kind.made / "config.json").read_text(encoding="utf-8"))
    if kind.stated is not None:
        config["quantization_config"] = dict(kind.stated)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(MADE / kind.made / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def leave(tensors: dict[str, Tensor]) -> None:
    """Change nothing."""


def spread_input_scales(tensors: dict[str, Tensor]) -> None:
    """Give each projection an input scale of its own, as no calibration of one input does."""
    for i, name in enumerate(sorted(name for name in tensors if name.endswith("input_scale"))):
        tensors[name] = tensors[name] * (1 + i / 8)


def options(device: str = "cuda") -> ModelOptions:
    return ModelOptions("bfloat16", device, pages=16)


def random_rows(count: int, inputs: int) -> Tensor:
    """Return rows of very different sizes, one of zeros among them."""
    x = torch.randn(count, inputs, generator=torch.Generator().manual_seed(1))
    sizes = 10.0 ** torch.linspace(-4, 4, count).unsqueeze(1)
    sizes[count // 2] = 0
    return (x * sizes).bfloat16()


def rounded_inputs(x: Tensor, kind: Kind, scale: Tensor | None) -> Tensor:
    """Return what a product's inputs are once the format has rounded them, widened again."""
    if scale is None:
        scale = x.float().abs().amax(-1, keepdim=True).clamp(max=kind.largest) / 448
        scale = scale.clamp(min=1e-30)
    codes = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.double() * scale.double()


@pytest.mark.parametrize("name", KINDS)
def test_products_are_those_of_widened_weights_and_inputs_rounded_as_the_format_says(
    name: str, card: Ledger, tmp_path: Path
) -> None:
    kind = KINDS[name]
    path = write(kind, tmp_path / "model", spread_input_scales)
    widened: Any = load_model(path, dtype=torch.float32, device="cpu", attention="eager").module
    stored = load_file(path / "model.safetensors")
    network: Any = open_model(path, options()).network
    [layer] = network.network.layers
    own: Any = widened.model.layers[0]
    for product, owners in PRODUCTS.items():
        linear = getattr(layer, product)
        linear = getattr(linear, "both", linear)
        assert isinstance(linear, Float8Linear)
        weight = torch.cat([own.get_submodule(owner).weight for owner in owners]).double()
        scales = [stored.get(f"model.layers.0.{owner}.input_scale") for owner in owners]
        scale = None
        if kind.is_static:
            scale = torch.stack([one for one in scales if one is not None]).amax()
        x = random_rows(9, weight.shape[1])
        expected = rounded_inputs(x, kind, scale) @ weight.T
        found = linear.forward(x.to(CARD)).cpu().double()
        largest = expected.abs().amax(1, keepdim=True).clamp(min=1e-30)
        assert float(((found - expected).abs() / largest).max()) < 2**-7


def logits(path: Path, *, device: str = "cuda", shard: Shard | None = None) -> Tensor:
    runner = open_model(path, options(device), shard=shard).runner
    return runner.run([Step(0, 0, TEXT)], [len(TEXT)]).cpu().float()


def reference_logits(path: Path, kind: Kind, *, rounds: bool) -> Tensor:
    """Return what transformers computes in fp32 with the widened weights."""
    module: Any = load_model(path, dtype=torch.float32, device="cpu", attention="eager").module
    stored = load_file(path / "model.safetensors")
    for name, part in module.named_modules():
        if rounds and type(part) is nn.Linear and name != "lm_head":
            scale = stored[f"{name}.input_scale"] if kind.is_static else None
            part.register_forward_pre_hook(
                lambda _, x, scale=scale: (rounded_inputs(x[0], kind, scale).float(),)
            )
    with torch.inference_mode():
        whole: Tensor = module(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    return whole


@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_the_reference_that_rounds_as_well(
    name: str, card: Ledger, tmp_path: Path
) -> None:
    kind = KINDS[name]
    path = write(kind, tmp_path / "model", leave)
    found = logits(path)
    expected, plain = (reference_logits(path, kind, rounds=rounds) for rounds in (True, False))
    # bf16 between the products changes which number of 8 bits an input is rounded to.
    error = float((found - expected).abs().mean())
    assert error < 0.08 * float(expected.std())
    assert error < float((found - plain).abs().mean())


@pytest.mark.parametrize("name", ["dynamic", "static"])
def test_ranks_keep_their_parts_of_an_fp8_checkpoint(name: str, tmp_path: Path) -> None:
    path = write(KINDS[name], tmp_path / name, leave)
    with emulated_cards(2) as ledger, card_ranks(2) as ranks:
        whole = logits(path)
        of_one = ledger.kernels["_scaled_mm"]
        found = ranks.run(lambda rank: logits(path, device=f"cuda:{rank}", shard=Shard(rank, 2)))
        assert ledger.kernels["_scaled_mm"] > 2 * of_one
    # Each rank rounds its own part of the inputs of a row-wise layer.
    error = float((found[0] - whole).abs().mean())
    assert error < (0.08 if name == "dynamic" else 0.04) * float(whole.std())


@pytest.mark.parametrize("kind", ["fp8-dynamic", "fp8-static"])
def test_ranks_hold_the_rows_and_columns_of_the_whole(kind: str) -> None:
    def load(shard: Shard | None) -> Any:
        return load_model(
            MADE / kind,
            dtype=torch.bfloat16,
            device="cpu",
            shard=shard,
            attention="eager",
            keeps=Codes.FLOAT8,
        ).module.get_submodule("model.layers.0.mlp")

    whole, shares = load(None), [load(Shard(rank, 2)) for rank in range(2)]
    for name, dim in (("gate_proj", 0), ("down_proj", 1)):
        parts = [float8_of(getattr(share, name)) for share in shares]
        all_of_it = float8_of(getattr(whole, name))
        assert all_of_it is not None
        assert all(part is not None and part.codes.dtype == FLOAT8 for part in parts)
        joined = [part.widen(torch.float32) for part in parts if part is not None]
        assert torch.equal(torch.cat(joined, dim), all_of_it.widen(torch.float32))


def test_joined_parts_round_their_inputs_by_the_largest_scale() -> None:
    parts = [
        Float8Weight(torch.ones(16, 16).to(FLOAT8), torch.full((16, 1), own), torch.tensor([[own]]))
        for own in (0.5, 2.0, 1.0)
    ]
    joined = join_float8(parts)
    assert joined.input_scale is not None
    assert joined.input_scale.tolist() == [[2.0]]
    assert joined.scales.flatten().tolist() == [0.5] * 16 + [2.0] * 16 + [1.0] * 16


@pytest.mark.parametrize("name", ["dynamic", "static"])
def test_weights_take_the_memory_that_is_counted(
    name: str, card: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(KINDS[name], tmp_path / "model", leave)
    module = load_model(path, dtype=torch.bfloat16, device=CARD, keeps=Codes.FLOAT8).module
    buffers = [b for n, b in module.named_buffers() if n.endswith("_scale")]
    taken = sum(tensor.nbytes for tensor in (*module.parameters(), *buffers))
    assert num_held_bytes(path, torch.bfloat16, keeps=Codes.FLOAT8) == taken
    assert sum(tensor.dtype == FLOAT8 for tensor in module.parameters()) == 7
    whole = num_weight_bytes(path, torch.bfloat16)
    assert taken < 0.8 * whole
    monkeypatch.setattr("specserve.models.memory.free_memory", lambda device: taken)
    open_model(path, options())
    with pytest.raises(TooLittleMemory):
        open_model(path, ModelOptions("float32", "cuda", pages=16))


def test_doctor_counts_weights_as_they_are_kept(card: Ledger, tmp_path: Path) -> None:
    path = write(KINDS["dynamic"], tmp_path / "model", leave)
    held = num_held_bytes(path, torch.bfloat16, keeps=Codes.FLOAT8)
    for ranks, device in ((1, "cuda"), (2, "cuda"), (1, "cpu")):
        keys = {"target.path": str(path), "target.device": device, "target.dtype": "bfloat16"}
        config = config_from_keys({**keys, "target.tensor_parallel": ranks, "draft.kind": "none"})
        need = room.memory_need(path, config.target, config, ranks=ranks).weight_bytes
        whole = num_weight_bytes(path, torch.bfloat16)
        assert need == (-(-held // ranks) if device == "cuda" else whole)


# What is widened, and why


def without_input_scales(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("input_scale")]:
        del tensors[name]


def of_odd_width(tensors: dict[str, Tensor]) -> None:
    """Leave 8 of the MLP's 128 columns out, and all else whole."""
    for name in list(tensors):
        if "_proj.weight" in name and "mlp" in name:
            dim = 1 if "down" in name else 0
            if tensors[name].dim() == 2 and tensors[name].shape[dim] == 128:
                tensors[name] = tensors[name].narrow(dim, 0, 120).contiguous()


WEIGHTS_ALONE = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {**INPUTS, "strategy": "channel"}}},
}
WIDENED: Mapping[str, tuple[Kind, Callable[[dict[str, Tensor]], None], str]] = {
    "weights alone": (Kind("fp8-dynamic", WEIGHTS_ALONE), leave, "its config does not say that"),
    "blocks": (Kind("fp8-block", None), leave, "its scales are those of blocks"),
    "static without scales": (KINDS["static"], without_input_scales, "it lacks the scales"),
}


@pytest.mark.parametrize("name", WIDENED)
def test_what_gpus_do_not_multiply_is_widened_and_the_log_says_why(
    name: str, card: Ledger, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind, change, why = WIDENED[name]
    path = write(kind, tmp_path / "model", change)
    with caplog.at_level(logging.WARNING):
        found = logits(path)
    assert card.kernels["_scaled_mm"] in (0, len(ROWS)), "more than a trial"
    assert torch.allclose(found, logits(path, device="cpu"), atol=0.3, rtol=0.1)
    [line] = [line for line in caplog.messages if "cuda" not in line and "FP8" in line]
    assert "its weights are widened to bfloat16 and take 0.0 GB instead of 0.0 GB; FP8 is" in line
    assert why in line


def test_older_cards_and_other_types_widen(
    card: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(KINDS["dynamic"], tmp_path / "model", leave)
    with caplog.at_level(logging.WARNING):
        open_model(path, ModelOptions("float32", "cuda", pages=16))
        assert "since its products are bfloat16, and the model's dtype is float32" in caplog.text
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        open_model(path, options())
    assert "since cuda:0 has compute capability 8.0" in caplog.text
    assert card.kernels["_scaled_mm"] == 0


def test_matrices_of_other_sizes_are_widened_beside_the_rest(card: Ledger, tmp_path: Path) -> None:
    path = write(KINDS["dynamic"], tmp_path / "model", of_odd_width)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    text = json.dumps({**config, "intermediate_size": 120})
    (path / "config.json").write_text(text, encoding="utf-8")
    network: Any = open_model(path, options()).network
    [layer] = network.network.layers
    kept = {name: isinstance(getattr(layer, name), Float8Linear) for name in ("qkv", "down")}
    assert kept == {"qkv": True, "down": False}
    module = load_model(path, dtype=torch.bfloat16, device=CARD, keeps=Codes.FLOAT8).module
    buffers = [b for n, b in module.named_buffers() if n.endswith("_scale")]
    taken = sum(tensor.nbytes for tensor in (*module.parameters(), *buffers))
    assert num_held_bytes(path, torch.bfloat16, keeps=Codes.FLOAT8) == taken


def test_a_bound_that_is_no_number_is_refused(card: Ledger, tmp_path: Path) -> None:
    stated = {"quant_method": "fbgemm_fp8", "activation_scale_ub": "high"}
    path = write(Kind("fp8-dynamic", stated), tmp_path / "model", leave)
    with pytest.raises(UnsupportedModel, match="activation_scale_ub 'high'"):
        open_model(path, options())


# Whole engines and other architectures


@pytest.fixture(scope="module")
def demo_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the demo target in FP8, and state that inputs are rounded by rows."""
    path = tmp_path_factory.mktemp("float8") / "target"
    write_quantized(DEMO / "target", "fp8", path)
    round_inputs_too(path)
    return path


def round_inputs_too(path: Path) -> None:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = BY_ROWS
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")


def test_greedy_texts_with_speculation_are_the_plain_ones(demo_target: Path, card: Ledger) -> None:
    prompts = list(held_out_prompts(count=3, length=40))
    sampling = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)
    texts, accepted = {}, {}
    for gamma, target in ((0, demo_target), (4, demo_target), (0, DEMO / "target")):
        keys = {"target.path": str(target), "draft.path": str(DEMO / "draft")}
        where = {"target.device": "cuda", "draft.device": "cuda", "cache.pages": 200}
        with LLM(None, None, **keys, **where, **{"speculation.gamma": gamma}) as llm:
            outputs = llm.generate(prompts, sampling)
        texts[gamma, target] = [output.token_ids for output in outputs]
        accepted[gamma, target] = sum(o.stats.accepted for o in outputs if o.stats is not None)
    assert texts[4, demo_target] == texts[0, demo_target]
    assert accepted[4, demo_target] > 10
    assert texts[0, demo_target] != texts[0, DEMO / "target"], "rounded weights and inputs matter"


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])  # fused with biases, and the library's code
def test_other_architectures_keep_fp8_too(name: str, card: Ledger, tmp_path: Path) -> None:
    write_quantized(checkpoints.make(name, tmp_path / "plain"), "fp8", tmp_path / "copy")
    widened = logits(tmp_path / "copy")
    assert card.kernels["_scaled_mm"] == 0
    round_inputs_too(tmp_path / "copy")
    found = logits(tmp_path / "copy")
    assert card.kernels["_scaled_mm"] > 8
    # Random weights make more of rounded rows than trained ones.
    assert 0 < float((found - widened).abs().mean()) < 0.25 * float(widened.std())
