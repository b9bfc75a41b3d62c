"""Quantise a tiny checkpoint with a format's own library, in an environment that has it.

Writes beside it which logits transformers computes with the matrices as that library widens them.
Run by `python -m tests.formats`; it imports nothing of specserve.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

GROUP = 32
PROMPT = list(range(3, 23))
NEW_TOKENS = 24
EXPECTED = "expected.json"
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
DYNAMIC_INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FP8 = {"num_bits": 8, "type": "float"}
FP4 = {"num_bits": 4, "type": "float"}
MX = {"strategy": "group", "group_size": GROUP, "scale_dtype": torch.uint8}


def compress(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> Any:
    """Return a function that quantises by llm-compressor, which writes compressed-tensors."""

    def make(plain: Path, out: Path) -> dict[str, Tensor]:
        from datasets import Dataset
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import QuantizationModifier

        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
        scheme = {"targets": ["Linear"], "weights": dict(weights)}
        if inputs is not None:
            scheme["input_activations"] = dict(inputs)
        recipe = QuantizationModifier(config_groups={"all": scheme}, ignore=["lm_head"])
        ids = [[(3 + 7 * row + column) % 280 for column in range(24)] for row in range(8)]
        oneshot(
            model=model,
            recipe=recipe,
            dataset=Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * 24] * 8}),
            num_calibration_samples=8,
            max_seq_length=24,
        )
        model.save_pretrained(out, save_compressed=True)
        is_fp4 = (weights["num_bits"], weights["type"]) == (4, "float")
        return _decompressed_fp4(out) if is_fp4 else _decompressed(out)

    return make


def _decompressed(directory: Path) -> dict[str, Tensor]:
    from transformers.utils.quantization_config import CompressedTensorsConfig

    whole = CompressedTensorsConfig(run_compressed=False)
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, quantization_config=whole
    )
    return {name: tensor.float() for name, tensor in model.state_dict().items()}


def _decompressed_fp4(directory: Path) -> dict[str, Tensor]:
    """Return the matrices by the library's functions in fp32; its model rounds them to bf16."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    stated = json.loads((directory / "config.json").read_text())["quantization_config"]
    groups = QuantizationConfig.model_validate(stated).config_groups
    [scheme] = groups.values()
    tensors = load_file(directory / "model.safetensors")
    state = {}
    for name in [name for name in tensors if name.endswith("_packed")]:
        owner = name.removesuffix("_packed")
        rows, half = tensors[name].shape
        scale = tensors[f"{owner}_scale"]
        if scale.dtype == torch.uint8:
            scale = torch.exp2(scale.float() - 127)
        state[owner] = dequantize(
            unpack_fp4_from_uint8(tensors[name], rows, 2 * half, dtype=torch.float32),
            scale.float(),
            args=scheme.weights,
            global_scale=tensors.get(f"{owner}_global_scale"),
            dtype=torch.float32,
        )
    return state


def gptq(*, in_order: bool = True, method: str = "gptq", layout: str = "gptq") -> Any:
    """Return a function that quantises by gptqmodel."""

    def make(plain: Path, out: Path) -> dict[str, Tensor]:
        from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
        from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

        config = QuantizeConfig(
            bits=4,
            group_size=GROUP,
            desc_act=not in_order,
            quant_method=method,
            format=layout,
            device="cpu",
        )
        model = GPTQModel.load(str(plain), config)
        ids = [[(3 + 7 * row + column) % 280 for column in range(24)] for row in range(32)]
        model.quantize([{"input_ids": row, "attention_mask": [1] * 24} for row in ids])
        model.save(str(out))
        backend = BACKEND.TORCH if method == "gptq" else BACKEND.TORCH_AWQ
        loaded = GPTQModel.load(str(out), device="cpu", backend=backend, dtype=torch.float16)

        def widen(module: Any) -> Tensor:
            module.scales = module.scales.float()
            if method == "gptq":
                return cast(Tensor, module.dequantize_weight()).T
            parts = module.qweight, module.qzeros, module.scales
            return cast(Tensor, dequantize_gemm(*parts, module.bits, module.group_size)).T

        return _dequantized(loaded.model, widen)

    return make


def bitsandbytes(**options: Any) -> Any:
    """Return a function that quantises by bitsandbytes, through transformers."""

    def make(plain: Path, out: Path) -> dict[str, Tensor]:
        from bitsandbytes import functional
        from transformers import BitsAndBytesConfig

        config = cast(Any, BitsAndBytesConfig)(**options)
        model = AutoModelForCausalLM.from_pretrained(
            plain,
            dtype=torch.float32,
            quantization_config=config,
            device_map="cpu",
        )
        model.save_pretrained(out)

        def widen(module: Any) -> Tensor:
            weight = module.weight
            if weight.dtype == torch.int8:
                return cast(Tensor, functional.int8_vectorwise_dequant(weight.data, weight.SCB))
            return cast(Tensor, functional.dequantize_4bit(weight.data, weight.quant_state))

        return _dequantized(model, widen)

    return make


def _dequantized(model: nn.Module, widen: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    """Return the state of a model, with each quantised matrix widened by its library."""
    state = {}
    for name, module in model.named_modules():
        if hasattr(module, "qweight") or "bitsandbytes" in type(module).__module__:
            state[f"{name}.weight"] = widen(module).float()
    plain = {name: tensor for name, tensor in model.state_dict().items() if "norm" in name}
    return {**state, **{name: tensor.float() for name, tensor in plain.items()}}


FORMATS: Mapping[str, Callable[[Path, Path], dict[str, Tensor]]] = {
    "fp8-dynamic": compress(
        {**FP8, "strategy": "channel"}, {**FP8, "strategy": "token", "dynamic": True}
    ),
    "fp8-static": compress({**FP8, "strategy": "tensor"}, {**FP8, "strategy": "tensor"}),
    "fp8-block": compress({**FP8, "strategy": "block", "block_structure": [GROUP, GROUP]}),
    "int8-w8a8": compress(INT8, DYNAMIC_INPUTS),
    "int8-w8a16": compress(INT8),
    "int4-w4a16": compress(INT4),
    "int4-w4a16-asymmetric": compress({**INT4, "symmetric": False}),
    "nvfp4a16": compress(
        {
            **FP4,
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": torch.float8_e4m3fn,
        }
    ),
    "mxfp4a16": compress({**FP4, **MX}),
    "mxfp8a16": compress({**FP8, **MX}),
    "gptq": gptq(),
    "gptq-activation-order": gptq(in_order=False),
    "awq": gptq(method="awq", layout="gemm"),
    "bitsandbytes-nf4": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes-nf4-double": bitsandbytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "bitsandbytes-fp4": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "bitsandbytes-int8": bitsandbytes(load_in_8bit=True),
}


def write(kind: str, plain: Path, out: Path) -> None:
    """Write the quantised checkpoint, and what the widened one says."""
    shutil.rmtree(out, ignore_errors=True)
    state = FORMATS[kind](plain, out)
    model: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    changed = {name: tensor for name, tensor in state.items() if name in model.state_dict()}
    matrices = [name for name in changed if name.endswith("proj.weight")]
    assert len(matrices) == 7 * model.config.num_hidden_layers, sorted(state)
    model.load_state_dict(changed, strict=False)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        logits = model(ids).logits[0, -1]
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
        )
    expected = {
        "tokens": text[0, len(PROMPT) :].tolist(),
        "logits": [round(float(logit), 5) for logit in logits],
    }
    (out / EXPECTED).write_text(json.dumps(expected) + "\n")
    kept = {"config.json", "model.safetensors", EXPECTED}
    for path in out.iterdir():
        if path.name not in kept:
            path.unlink()


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
