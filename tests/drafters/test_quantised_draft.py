"""A draft whose weights are rounded as they are read: the text stays the target's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specserve import LLM, Sampling
from specserve.checkpoint_files import find_checkpoints
from specserve.cluster.placement import bundles
from specserve.config.tree import config_from_keys
from specserve.errors import ConfigError, TooLittleMemory, UnsupportedModel
from specserve.models.checkpoints.quantize import write_quantized
from specserve.models.checkpoints.weights import num_weight_bytes
from specserve.models.cpu.linear_kernels import missing_for_compiled
from specserve.models.model import ModelOptions, open_model
from specserve.types import Step
from tests.formats.check import MADE
from tests.support import checkpoints
from tests.support.card import emulated_cards
from tests.support.self_speculative_engines import LLM_KEYS, TEXT

DTYPES = ["float32"] + ["bfloat16"] * torch.ops.mkldnn._is_mkldnn_bf16_supported()
PROMPTS = [TEXT, TEXT[5:], TEXT[::-1]]
GREEDY = Sampling(max_tokens=32, temperature=0, ignore_eos=True)
SEEDED = Sampling(max_tokens=32, temperature=0.8, seed=7, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = checkpoints.make("llama", tmp_path_factory.mktemp("target"))
    checkpoints.add_tokenizer(directory)
    return directory


def generate(
    target: Path, sampling: Sampling, **keys: object
) -> tuple[list[tuple[int, ...]], int, int]:
    """Return texts, and how many draft tokens were drafted and accepted."""
    with LLM(target, **{**LLM_KEYS, "target.dtype": "auto", "draft.dtype": "auto", **keys}) as llm:
        outputs = llm.generate(PROMPTS, sampling)
    stats = [output.stats for output in outputs if output.stats is not None]
    return (
        [tuple(output.token_ids) for output in outputs],
        sum(stat.drafted for stat in stats),
        sum(stat.accepted for stat in stats),
    )


def test_texts_are_those_without_a_draft(target: Path) -> None:
    plain, _, _ = generate(target, GREEDY, **{"draft.kind": "none"})
    for bits in ("int8", "int4"):
        # The target itself drafts, rounded: what it computes is near, and not the same.
        keys = {"draft.kind": "neural", "draft.path": str(target), "draft.quantize": bits}
        texts, drafted, accepted = generate(target, GREEDY, **keys)
        assert texts == plain
        assert drafted > 20
        assert 0 < accepted <= drafted


@pytest.mark.parametrize(
    ("sampling", "verifier"),
    [(GREEDY, "speculative"), (SEEDED, "coupled")],
    ids=["greedy", "drawn"],
)
def test_texts_with_a_draft_in_fp8_on_a_card_are_those_without_one(
    sampling: Sampling, verifier: str, target: Path
) -> None:
    keys = {"target.device": "cuda", "target.dtype": "float32", "speculation.verifier": verifier}
    small = {"draft.device": "cuda", "draft.path": str(target), "draft.quantize": "fp8"}
    with emulated_cards() as ledger:
        plain, _, _ = generate(target, sampling, **keys, **{"draft.kind": "none"})
        texts, drafted, accepted = generate(target, sampling, **keys, **small)
        assert ledger.kernels["_scaled_mm"] > 100
    assert texts == plain
    assert 20 < accepted < drafted


@pytest.mark.parametrize("to", ["int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_while_loading_gives_the_numbers_of_a_written_copy(
    to: str, dtype: str, target: Path, tmp_path: Path
) -> None:
    write_quantized(target, to, tmp_path / to)
    found = []
    for directory, round_to in ((target, to), (tmp_path / to, None), (target, None)):
        options = ModelOptions(dtype=dtype, device="cpu", pages=8, round_to=round_to)
        runner = open_model(directory, options).runner
        found.append(runner.run([Step(0, 0, TEXT)], [len(TEXT)]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.skipif(missing_for_compiled() is not None, reason=f"it needs {missing_for_compiled()}")
def test_a_draft_has_room_where_only_its_small_integers_fit(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = num_weight_bytes(target, torch.bfloat16)
    monkeypatch.setattr("specserve.models.memory.free_memory", lambda device: whole - 1)
    options = ModelOptions("bfloat16", "cpu", pages=8)
    with pytest.raises(TooLittleMemory):
        open_model(target, options)
    for to in ("int8", "int4"):
        open_model(target, replace(options, round_to=to))


def test_fp8_without_a_gpu_is_refused_before_the_target_is_read(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"draft.kind": "neural", "draft.path": str(target), "draft.quantize": "fp8"}
    with pytest.raises(ConfigError, match="fp8 needs a GPU, and draft"):
        config_from_keys({"target.path": str(target), "draft.device": "cpu", **keys})
    monkeypatch.delattr("specserve.llm.inprocess.open_target")
    with pytest.raises(ConfigError, match="fp8 needs a GPU, and the draft's device is the CPU"):
        LLM(target, **keys)
    config = config_from_keys({"target.path": str(target), **keys})
    with pytest.raises(ConfigError, match="fp8 needs a GPU, and the cluster has none"):
        bundles(config, has_gpus=False)
    assert len(bundles(config, has_gpus=True)) == 3


def test_a_draft_that_is_quantised_already_is_refused_before_it_is_read(target: Path) -> None:
    keys = {"target.path": str(target), "draft.path": str(MADE / "gptq"), "draft.quantize": "int4"}
    with pytest.raises(UnsupportedModel, match=r"is quantized already \(gptq\)"):
        find_checkpoints(config_from_keys(keys))


def test_what_has_no_weights_of_a_model_is_not_rounded() -> None:
    keys = {"target.path": "x", "draft.kind": "max_gram", "draft.quantize": "int8"}
    with pytest.raises(ConfigError, match=r"draft.quantize rounds a neural draft's weights"):
        config_from_keys(keys)
    with pytest.raises(
        ConfigError, match=r"draft.quantize must be one of int8, int4, fp8, not 'int2'"
    ):
        config_from_keys(keys | {"draft.kind": "neural", "draft.quantize": "int2"})
