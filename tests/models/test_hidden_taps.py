"""Taps between the layers of a target show what the library's own layers get."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from specserve.config.tree import DEMO
from specserve.models.hidden_taps import HiddenRows, HiddenTaps
from specserve.models.model import open_model
from specserve.models.shard import Shard
from specserve.models.target import TargetFollower
from specserve.types import Policy, VerifyStep, Warp
from tests.support import checkpoints
from tests.support.engines import load_target, model_options

POLICY = Policy(Warp(temperature=0), "block", 1, prompt_length=3)


def handed_over(
    target: Path, taps: tuple[int, ...], *steps: VerifyStep, dtype: str
) -> list[HiddenRows]:
    """Return what a target hands over of passes with one of these steps each."""
    model = load_target(target, model_options(dtype=dtype, pages=20), taps=HiddenTaps(taps))
    found: list[HiddenRows] = []
    model.on_hidden = found.extend
    for step in steps:
        model.verify([step])
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_demo_targets_states_are_those_of_the_library(dtype: str) -> None:
    """Run the fused network; in bf16, where it is compiled, layers overwrite their input."""
    text = tuple(range(50, 70))
    (found,) = handed_over(
        DEMO / "target", (6, 0, 3), VerifyStep(1, 0, text, (), None, POLICY), dtype=dtype
    )
    library = AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32)
    with torch.inference_mode():
        states = library(torch.tensor([text]), output_hidden_states=True).hidden_states
    assert (found.seq_id, found.start, found.stop) == (1, 0, 20)
    for rows, layer in zip(found.rows.float().chunk(3, dim=-1), (6, 0, 3), strict=True):
        expected = states[layer][0]
        error = (rows - expected).norm() / expected.norm()
        assert error < (0.03 if dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "gpt_neox", "mixtral"])
def test_layers_of_every_kind_are_tapped(name: str, tmp_path: Path) -> None:
    target = checkpoints.make(name, tmp_path / "target")
    text = tuple(range(50, 70))
    (found,) = handed_over(
        target, (0, 1, 1), VerifyStep(1, 0, text, (), None, POLICY), dtype="float32"
    )
    library = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        states = library(torch.tensor([text]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer][0] for layer in (0, 1, 1)], dim=-1)
    torch.testing.assert_close(found.rows, expected, rtol=1e-4, atol=1e-4)


def test_rows_of_rejected_draft_tokens_are_not_handed_over(tmp_path: Path) -> None:
    target = checkpoints.make("llama", tmp_path / "target")
    text = tuple(range(50, 60))
    first = VerifyStep(1, 0, text, (), None, POLICY)
    model = load_target(target, model_options(pages=20), taps=HiddenTaps((1, 2, 2)))
    found: list[HiddenRows] = []
    model.on_hidden = found.extend
    (verdict,) = model.verify([first])
    newest = verdict.next_token
    (after,) = model.verify([VerifyStep(1, 10, (newest,), (), None, POLICY)])
    drafts = (after.next_token, (after.next_token + 1) % checkpoints.VOCAB, 5)
    model.verify([VerifyStep(1, 10, (newest,), drafts, None, POLICY)])
    assert [(one.start, one.stop) for one in found][:2] == [(0, 10), (10, 11)]
    assert found[2].start == 10
    assert found[2].stop < 14, "the state of a rejected draft token was handed over"


def test_the_last_layers_output_can_be_tapped(tmp_path: Path) -> None:
    target = checkpoints.make("llama", tmp_path / "target")
    (found,) = handed_over(
        target, (0, 1, 2), VerifyStep(1, 0, (7, 8, 9), (), None, POLICY), dtype="float32"
    )
    library = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        out = library(torch.tensor([[7, 8, 9]]), output_hidden_states=True)
        normed = library.model.norm(found.rows[:, 128:])
    torch.testing.assert_close(normed, out.hidden_states[-1][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "phi3"], ids=["fused", "library"])
def test_rank_0_of_two_hands_over_whole_states(name: str, tmp_path: Path) -> None:
    target = checkpoints.make(name, tmp_path / "target")
    step = VerifyStep(1, 0, tuple(range(50, 70)), (), None, POLICY)
    (alone,) = handed_over(target, (0, 1, 2), step, dtype="float32")
    store: Any = cast(Any, dist).HashStore()

    def join(rank: int) -> Shard:
        backend = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        group: Any = dist.ProcessGroup(store, rank, 2)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        return Shard(rank, 2, group)

    with ThreadPoolExecutor(2) as threads:
        shards = list(threads.map(join, range(2)))
        first = load_target(
            target, model_options(pages=20), shard=shards[0], taps=HiddenTaps((0, 1, 2))
        )
        other = open_model(target, model_options(pages=20), shard=shards[1])
        found: list[HiddenRows] = []
        first.on_hidden = found.extend
        follower = TargetFollower(other.runner, first.info)
        list(threads.map(lambda rank: rank.verify([step]), (first, follower)))
    torch.testing.assert_close(found[0].rows, alone.rows, rtol=1e-3, atol=1e-4)
    assert first.network is not None
    assert first.network.embedding.shape == (checkpoints.VOCAB, 64), "a head reads it whole"
