"""Quantised copies: their files, how near they are, and what is refused before one is begun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from specserve.errors import BadValue, SpecserveError, UnsupportedModel
from specserve.models.checkpoints import writer
from specserve.models.checkpoints.load import load_model
from specserve.models.checkpoints.quantize import SCHEMES, write_quantized
from specserve.models.checkpoints.quantized.blocks import unpack
from specserve.models.checkpoints.rounding import pack_integers, round_to_integers
from specserve.tools.quantize import Shift
from tests.families.make import write as write_family
from tests.formats.check import MADE
from tests.support import checkpoints

LIBRARY_S = {"int8": "int8-w8a16", "int4": "int4-w4a16", "fp8": "fp8-dynamic"}
"""Checkpoints of the same kind that the format's own library wrote."""
STEPS = {"int8": 0.5 / 127, "int4": 0.5 / 5, "fp8": 1 / 16}
"""Largest errors, as shares of the largest number with the same scale."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(**checkpoints.GROUPED)
    return checkpoints.write(config, tmp_path_factory.mktemp("plain"))


def weights(directory: Path) -> dict[str, Tensor]:
    return load_model(directory, dtype=torch.float32, device="cpu").module.state_dict()


@pytest.mark.parametrize("to", SCHEMES)
def test_matrices_are_near_and_everything_else_is_as_it_was(
    to: str, plain: Path, tmp_path: Path
) -> None:
    layers = LlamaConfig(**checkpoints.GROUPED).num_hidden_layers
    assert write_quantized(plain, to, tmp_path / to) == 7 * layers
    before, after = weights(plain), weights(tmp_path / to)
    assert before.keys() == after.keys()
    for name, matrix in before.items():
        if not name.endswith("proj.weight"):
            assert torch.equal(matrix, after[name]), name
            continue
        size = 32 if to == "int4" else matrix.shape[1]
        groups = matrix.view(len(matrix), -1, size)
        largest = groups.abs().amax(-1, keepdim=True)
        error = (after[name].view_as(groups) - groups).abs()
        # The largest numbers of 4 bits may be cut to three quarters.
        inner = groups.abs() < 0.7 * largest if to == "int4" else error >= 0
        assert bool((error <= 1.05 * STEPS[to] * largest)[inner].all()), name
        assert error.max() > 0


@pytest.mark.parametrize("to", SCHEMES)
def test_the_files_are_laid_out_as_the_library_lays_its_own_out(
    to: str, plain: Path, tmp_path: Path
) -> None:
    write_quantized(plain, to, tmp_path / to)
    own, library = (
        _kinds(directory / "model.safetensors")
        for directory in (tmp_path / to, MADE / LIBRARY_S[to])
    )
    assert own == library
    stated, theirs = (
        json.loads((directory / "config.json").read_text(encoding="utf-8"))["quantization_config"]
        for directory in (tmp_path / to, MADE / LIBRARY_S[to])
    )
    assert {name: theirs[name] for name in ("quant_method", "format", "ignore")} == {
        name: stated[name] for name in ("quant_method", "format", "ignore")
    }
    [group], [their_group] = (s["config_groups"].values() for s in (stated, theirs))
    assert group["targets"] == their_group["targets"]
    assert group["weights"].items() <= their_group["weights"].items()


def _kinds(path: Path) -> dict[str, tuple[str, int]]:
    """Return type and dimensions of a layer's matrices; scales have the type of the weights."""
    with safe_open(path, framework="pt") as file:
        slices = {
            name: file.get_slice(name)
            for name in file.keys()  # noqa: SIM118 (no mapping)
            if name.startswith("model.layers.0.mlp.")
        }
    return {
        name: ("" if name.endswith("scale") else str(part.get_dtype()), len(part.get_shape()))
        for name, part in slices.items()
    }


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_are_packed_so_that_the_reader_finds_them(bits: int) -> None:
    matrix = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    integers, scales = round_to_integers(matrix, bits, 32, torch.bfloat16)
    assert scales.shape == (6, 2)
    assert torch.equal(unpack(pack_integers(integers, bits), bits) - 2 ** (bits - 1), integers)


def test_rows_of_zeros_stay_zeros() -> None:
    for bits in (4, 8):
        integers, scales = round_to_integers(torch.zeros(2, 32), bits, 32, torch.float32)
        assert not integers.any()
        assert bool((scales == 1).all())
    encoded = SCHEMES["fp8"].encode("w", torch.zeros(2, 32), 0)
    assert not encoded["w"].float().any()


def test_large_checkpoints_are_written_in_several_files(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_quantized(plain, "int8", tmp_path / "one")
    monkeypatch.setattr(writer, "SHARD_BYTES", 20_000)
    write_quantized(plain, "int8", tmp_path / "many")
    files = list((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    whole = load_file(tmp_path / "one" / "model.safetensors")
    parts = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert whole.keys() == parts.keys()
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())


# What is refused


@pytest.mark.parametrize(
    ("name", "to", "why"),
    [
        ("t5", "int8", "is an encoder-decoder; only decoders"),
        ("qwen3_vl", "int8", "is multimodal; only plain decoders"),
        ("gpt2", "int8", "gpt2 keeps no matrix in a linear layer"),
        ("odd", "int4", "needs rows of a multiple of 32 numbers, and .* has 80; use int8"),
        ("quantised", "int4", r"is quantized already \(compressed-tensors\)"),
    ],
)
def test_what_cannot_be_quantised_is_refused_before_anything_is_written(
    name: str, to: str, why: str, tmp_path: Path
) -> None:
    source = tmp_path / name
    if name == "odd":
        sizes = {**checkpoints.GROUPED, "intermediate_size": 80}
        checkpoints.write(LlamaConfig(**sizes), source)
    elif name == "qwen3_vl":
        write_family(name, source)
    elif name == "quantised":
        source = MADE / "int8-w8a16"
    else:
        kinds = {**checkpoints.CONFIGS, **checkpoints.ENCODER_DECODERS}
        checkpoints.write(kinds[name](), source)
    with pytest.raises(UnsupportedModel, match=why):
        write_quantized(source, to, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_directory_with_something_in_it_is_not_written_to(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine", encoding="utf-8")
    for out in (tmp_path, tmp_path / "note"):
        with pytest.raises(BadValue, match="is not empty; name a new directory"):
            write_quantized(plain, "int8", out)
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_a_config_of_no_known_model_is_refused(tmp_path: Path, plain: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "oracle"}', encoding="utf-8")
    with pytest.raises(SpecserveError, match="transformers knows"):
        write_quantized(tmp_path, "int8", tmp_path / "out")


# How far a distribution moved


def test_a_shift_is_that_of_known_distributions() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])
    q = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]])
    shift = Shift.from_logits(p.log(), q.log())
    assert shift.divergence == pytest.approx(0.25 * torch.log(torch.tensor(2.0)).item() / 2)
    assert (shift.agreement, shift.num_tokens) == (0.5, 2)
    assert shift.overlap == pytest.approx((0.75 + 1) / 2)
