"""Reading parts of a checkpoint: the right rows and columns, of experts too, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specserve.errors import ModelError
from specserve.models.checkpoints.weights import Weights, weight_files

EXPERTS, INNER, HIDDEN = 11, 4, 3  # more than ten, so that an order by spelling would show


def write_weights(directory: Path, tensors: dict[str, Tensor]) -> Weights:
    save_file(tensors, directory / "model.safetensors")
    return Weights(directory, prefix="model")


def matrix(rows: int, columns: int, *, start: int = 0) -> Tensor:
    return torch.arange(start, start + rows * columns, dtype=torch.float32).view(rows, columns)


def test_ranges_of_rows_and_of_columns(tmp_path: Path) -> None:
    whole = matrix(6, 4)
    weights = write_weights(tmp_path, {"model.a.weight": whole, "model.a.bias": torch.arange(6.0)})
    assert torch.equal(weights.read("model.a.weight"), whole)
    assert torch.equal(
        weights.read("model.a.weight", dim=-2, ranges=[(0, 2), (4, 5)]), whole[[0, 1, 4]]
    )
    assert torch.equal(weights.read("model.a.weight", dim=-1, ranges=[(3, 4)]), whole[:, 3:])
    assert torch.equal(
        weights.read("model.a.bias", dim=-1, ranges=[(1, 3)]), torch.tensor([1.0, 2.0])
    )


@pytest.mark.parametrize(
    ("gate", "up", "down"),
    [
        (
            "block_sparse_moe.experts.{}.w1",
            "block_sparse_moe.experts.{}.w3",
            "block_sparse_moe.experts.{}.w2",
        ),
        ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
    ],
)
def test_experts_kept_apart_are_stacked_in_their_order(
    gate: str, up: str, down: str, tmp_path: Path
) -> None:
    gates = [matrix(INNER, HIDDEN, start=100 * expert) for expert in range(EXPERTS)]
    ups = [matrix(INNER, HIDDEN, start=100 * expert + 50) for expert in range(EXPERTS)]
    downs = [matrix(HIDDEN, INNER, start=100 * expert + 25) for expert in range(EXPERTS)]
    named = {gate: gates, up: ups, down: downs}
    weights = write_weights(
        tmp_path,
        {
            f"model.{name.format(e)}.weight": matrices[e]
            for name, matrices in named.items()
            for e in range(EXPERTS)
        },
    )
    gate_up = torch.cat([torch.stack(gates), torch.stack(ups)], dim=1)  # [experts, 2 inner, hidden]
    assert torch.equal(weights.read("model.mlp.experts.gate_up_proj"), gate_up)
    assert torch.equal(
        weights.read("model.mlp.experts.gate_up_proj", dim=-2, ranges=[(2, 4), (6, 8)]),
        gate_up[:, [2, 3, 6, 7]],
    )
    assert torch.equal(
        weights.read("model.mlp.experts.down_proj", dim=-1, ranges=[(0, 2)]),
        torch.stack(downs)[..., :2],
    )
    assert weights.unread() == set()


def test_names_without_the_base_models_prefix_are_found(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, {"a.weight": matrix(2, 2), "b.weight": matrix(2, 2)})
    assert "model.a.weight" in weights
    assert "model.c.weight" not in weights
    assert torch.equal(weights.read("model.a.weight"), matrix(2, 2))
    assert weights.unread() == {"b.weight"}


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": 3}'])
def test_a_broken_index_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match="is no index"):
        Weights(tmp_path, prefix="model")


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "a/../../b"])
def test_an_index_that_leads_out_of_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(ModelError, match="outside the checkpoint's folder"):
        weight_files(tmp_path)


def test_a_file_that_the_index_promises_and_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00001-of-00001.safetensors"}}'
    )
    with pytest.raises(ModelError, match="cannot be read"):
        Weights(tmp_path, prefix="model")
