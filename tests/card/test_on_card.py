"""Models on an emulated card compute what they compute on the CPU, and keep a card's rules."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specserve.errors import ConfigError
from specserve.models.checkpoints.load import load_model
from specserve.models.checkpoints.weights import Weights
from specserve.models.gpu import flashinfer_attention, graphs
from specserve.models.gpu.graphs import GraphedNetwork
from specserve.models.llama import FusedLayer
from specserve.models.model import ModelOptions, open_model
from specserve.models.runner import Runner
from specserve.models.shard import Shard
from specserve.types import Step
from tests.support import checkpoints
from tests.support.card import CardError, emulated_cards, flashinfer

TEXT = tuple(np.random.default_rng(0).integers(3, checkpoints.VOCAB, 700).tolist())
LENGTHS = (7, 130, 255)
KINDS = (*checkpoints.ARCHITECTURES, *checkpoints.ENCODER_DECODERS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("on_card")


def checkpoint(directory: Path, kind: str) -> Path:
    configs = {**checkpoints.CONFIGS, **checkpoints.ENCODER_DECODERS}
    path = directory / kind
    return path if path.exists() else checkpoints.write(configs[kind](), path)


def runner(path: Path, device: str, **options: Any) -> Runner:
    options = {"dtype": "float32", "pages": 400, "prefix_caching": False, **options}
    return open_model(path, ModelOptions(device=device, **options)).runner


def decoded(model: Runner, counts: Sequence[int], *, turns: int = 3) -> Tensor:
    """Return logits of passes of `counts` tokens after prompts of LENGTHS, a prompt beside one."""
    out = []
    is_t5 = hasattr(model, "encoder_cache")
    done = []
    for seq_id, length in enumerate(LENGTHS):
        prompt = TEXT[:length]
        step = Step(seq_id, 0, (0,), prompt) if is_t5 else Step(seq_id, 0, prompt)
        done.append(len(step.tokens))
        model.run([step], [0])
    for _ in range(turns):
        steps = [
            Step(seq_id, start, TEXT[start : start + count])
            for seq_id, (start, count) in enumerate(zip(done, counts, strict=True))
        ]
        out.append(model.run(steps, list(counts)))
        done = [start + count for start, count in zip(done, counts, strict=True)]
    return torch.cat(out).cpu()


@cache
def decoded_on_cpu(path: Path, counts: tuple[int, ...]) -> Tensor:
    return decoded(runner(path, "cpu"), counts)


@pytest.mark.parametrize("counts", [(1, 1, 1), (5, 1, 60)], ids=["even", "uneven"])
@pytest.mark.parametrize("attention", ["sdpa", "invariant"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("card", ["emulated", pytest.param("real", marks=pytest.mark.gpu)])
def test_logits_are_those_of_the_cpu(
    directory: Path, card: str, kind: str, attention: str, counts: tuple[int, ...]
) -> None:
    path = checkpoint(directory, kind)
    expected = decoded_on_cpu(path, counts)
    with emulated_cards() if card == "emulated" else nullcontext():
        found = decoded(runner(path, "cuda", attention=attention), counts)
    tolerance = 5e-4 if card == "emulated" else 1e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", checkpoints.ARCHITECTURES)
def test_flashinfer_and_its_graphs_give_the_logits_of_the_cpu(
    directory: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare in fp32, which the original lacks, so that no rounding hides a fault."""
    monkeypatch.setattr(flashinfer_attention, "TYPES", (torch.float32,))
    path, counts = checkpoint(directory, kind), (5, 1, 9)
    expected = decoded(runner(path, "cpu"), counts)
    with emulated_cards() as ledger, flashinfer.installed(dtypes=(torch.float32,)):
        model = runner(path, "cuda")
        has_sinks = kind == "gpt_oss"
        assert (model.planner.geometry.run_rows is None) is has_sinks
        ledger.clear()
        found = decoded(model, counts)
        assert has_sinks or (ledger.num_graphs, ledger.num_replays) == (0, 4), "passes of few rows"
    torch.testing.assert_close(found, expected, atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"dtype": "bfloat16"}, 0.5, "off by"),
        ({"dtype": "float32"}, 0.0, "bfloat16 and float16 only"),
    ],
    ids=["wrong numbers", "a type that it lacks"],
)
def test_auto_takes_torchs_attention_where_flashinfer_is_no_good(
    directory: Path,
    options: dict[str, Any],
    error: float,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with emulated_cards(), flashinfer.installed(error=error), caplog.at_level(logging.INFO):
        model = runner(checkpoint(directory, "llama"), "cuda", **options)
        assert model.planner.geometry.run_rows is None
        assert reason in caplog.text
        with pytest.raises(ConfigError, match=reason):
            runner(checkpoint(directory, "llama"), "cuda", attention="flashinfer", **options)


def test_package_that_cannot_be_imported_is_named(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    absent = mock.patch.dict(sys.modules, {"flashinfer": None})
    with emulated_cards(), absent, caplog.at_level(logging.INFO):
        runner(checkpoint(directory, "llama"), "cuda", dtype="bfloat16")
    assert "FlashInfer cannot be used: ModuleNotFoundError" in caplog.text


def test_graphs_are_captured_once_for_a_shape_and_replayed(directory: Path) -> None:
    with emulated_cards() as ledger:
        model = runner(checkpoint(directory, "llama"), "cuda", attention="sdpa")
        assert isinstance(model.network, GraphedNetwork)
        decoded(model, (1, 1, 1), turns=1)
        ledger.clear()
        decoded(model, (1, 1, 1), turns=1)
    assert ledger.num_graphs == 0
    assert ledger.num_replays == 2, "the last row of the first prompt, and the pass"


def test_graphs_of_the_second_card_replay_their_own_pass(directory: Path) -> None:
    path = checkpoint(directory, "llama")
    expected = decoded(runner(path, "cpu"), (1, 1, 1))
    with emulated_cards(2) as ledger:
        decoded(runner(path, "cuda:0", attention="sdpa"), (1, 1, 1))
        ledger.clear()
        found = decoded(runner(path, "cuda:1", attention="sdpa"), (1, 1, 1))
        assert ledger.num_replays >= 3
    torch.testing.assert_close(found, expected, atol=5e-4, rtol=5e-4)


def test_model_that_cannot_be_captured_runs_its_passes(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint(directory, "llama")
    expected = decoded(runner(path, "cpu"), (1, 1, 1))
    norm = FusedLayer.forward

    def reads_on_the_host(self: FusedLayer, hidden: Tensor, *given: Any) -> Tensor:
        hidden.sum().item()
        return norm(self, hidden, *given)

    monkeypatch.setattr(FusedLayer, "forward", reads_on_the_host)
    with emulated_cards() as ledger:
        found = decoded(runner(path, "cuda", attention="sdpa"), (1, 1, 1))
        assert ledger.num_replays == 0
    assert "CUDA graphs are off: a pass cannot be captured: _local_scalar_dense" in caplog.text
    torch.testing.assert_close(found, expected, atol=5e-4, rtol=5e-4)


def test_no_more_graphs_are_captured_than_their_memory_allows(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPH_BYTES", 1)
    with emulated_cards() as ledger:
        model = runner(checkpoint(directory, "llama"), "cuda", attention="sdpa")
        decoded(model, (1, 1, 1), turns=1)
        decoded(model, (4, 4, 4), turns=1)
        assert ledger.num_graphs == 1


def test_weights_reach_the_card_one_tensor_at_a_time(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the ranks of a large model need as much host memory as the model takes."""
    read, alive = Weights.read, list[weakref.ref[Tensor]]()
    most = 0

    def counted(self: Weights, *args: Any, **options: Any) -> Tensor:
        nonlocal most
        tensor = read(self, *args, **options)
        alive.append(weakref.ref(tensor))
        most = max(most, sum(one() is not None for one in alive))
        return tensor

    monkeypatch.setattr(Weights, "read", counted)
    with emulated_cards():
        load_model(
            checkpoint(directory, "llama"),
            dtype=torch.float32,
            device="cuda:0",
            shard=Shard(0, 2),
        )
    assert len(alive) > 10
    assert most <= 2, "the one that was read last, and the one before it"


def test_whole_model_is_loaded_onto_the_card_by_the_library(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library puts each tensor where `device_map` says as soon as it is read."""
    given = []
    read = AutoModelForCausalLM.from_pretrained

    def recorded(*args: Any, **options: Any) -> Any:
        given.append(options["device_map"])
        return read(*args, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", recorded)
    with emulated_cards():
        runner(checkpoint(directory, "llama"), "cuda")
    runner(checkpoint(directory, "llama"), "cpu")
    assert given == [{"": torch.device("cuda", 0)}, None]


def test_flashinfer_needs_no_compiler_for_the_processor(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = [name for name in sys.modules if name.startswith("specserve.models.cpu.compiled")]
    for name in ("llvmlite", "llvmlite.ir", *loaded):
        monkeypatch.setitem(sys.modules, name, None)
    with emulated_cards(), flashinfer.installed():
        model = runner(checkpoint(directory, "llama"), "cuda", dtype="bfloat16")
        assert model.planner.geometry.run_rows is not None
        decoded(model, (1, 1, 1), turns=1)


def test_device_that_is_not_there_is_refused(directory: Path) -> None:
    with emulated_cards(), pytest.raises(ConfigError, match="cuda:1 was asked for, and only 1"):
        runner(checkpoint(directory, "llama"), "cuda:1")


def test_host_tensor_beside_those_of_a_card_is_refused() -> None:
    with emulated_cards(), pytest.raises(CardError, match="of the host beside a card's"):
        torch.ones(3, device="cuda:0") + torch.ones(3)
