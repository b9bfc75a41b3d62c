"""Long prompts with scaled rotary frequencies: the library's text, whatever the chunks.

The gate has 2,048 positions; `long` tests have 32,768.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from specserve.models.attention_kernels import MAX_SCORES
from specserve.models.llama import FusedNetwork
from specserve.models.model import ModelOptions, open_model
from specserve.types import Step
from tests.support import checkpoints
from tests.support.claims import wait_until_claimed
from tests.support.engines import PAGE_SIZE, Engine, greedy

SHORT, LONG = 2_048, 32_768
MAX_TOKENS, GAMMA, DRAFT_NOISE = 12, 3, 0.05
CHUNK = 512
MAX_GROWTH = 2 * 2**30
"""Bytes for a prompt of LONG; all scores of a chunk would take 0.5 GiB, ten times."""
LENGTHS = [
    pytest.param(SHORT, id="2k"),
    pytest.param(LONG, id="32k", marks=pytest.mark.long),
]


def scalings(length: int) -> Mapping[str, dict[str, Any]]:
    """Return rotary parameters of a model that was trained at an eighth of `length`."""
    scaled = {"rope_theta": 1e4, "factor": 8.0}
    trained = {"original_max_position_embeddings": length // 8}
    return {
        "linear": {**scaled, "rope_type": "linear"},
        "dynamic": {**scaled, "rope_type": "dynamic"},
        "yarn": {**scaled, **trained, "rope_type": "yarn"},
        "llama3": {
            **scaled,
            **trained,
            "rope_type": "llama3",
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    }


KINDS = tuple(scalings(SHORT))


def write(directory: Path, kind: str, length: int, **sizes: Any) -> Path:
    config = LlamaConfig(
        **{
            **checkpoints.GROUPED,
            "max_position_embeddings": length,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "hidden_size": 32,
            **sizes,
        },
        rope_parameters=scalings(length)[kind],
    )
    return checkpoints.write(config, directory)


def text(length: int, *, seed: int = 0) -> tuple[int, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(3, checkpoints.VOCAB, length).tolist())


def library_text(directory: Path, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Return what generate() writes; with `sdpa`, so that no matrix of all scores is made."""
    library: Any = AutoModelForCausalLM
    model = library.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False
    )
    return tuple(out[0, len(prompt) :].tolist())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_behind_a_long_prompt_is_the_library_s_in_chunks_and_in_one_pass(
    one_thread: None, kind: str, length: int, tmp_path: Path
) -> None:
    target = write(tmp_path / "target", kind, length)
    draft = checkpoints.perturb(target, tmp_path / "draft", DRAFT_NOISE)
    prompt = text(length - MAX_TOKENS)
    expected = library_text(target, prompt)
    engine = Engine(target, draft, pages=length // PAGE_SIZE + 8, prefix_caching=False)
    assert isinstance(engine.target.runner.network, FusedNetwork)
    requests = greedy([prompt], max_tokens=MAX_TOKENS)
    chunked = engine.run(requests, gamma=GAMMA, max_batch_tokens=CHUNK)
    assert chunked.texts == [expected]
    assert chunked.accepted > 0
    if length == SHORT:
        whole = engine.run(requests, gamma=GAMMA, max_batch_tokens=2 * length)
        assert whole.texts == [expected]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", ["dynamic", "yarn"])
def test_the_last_logits_of_a_long_prompt_have_the_same_bits_in_any_chunks(
    one_thread: None, kind: str, length: int, tmp_path: Path
) -> None:
    wide = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 128}
    directory = write(tmp_path, kind, length, **wide)
    options = ModelOptions(
        dtype="bfloat16", device="cpu", pages=length // PAGE_SIZE + 8, prefix_caching=False
    )
    runner = open_model(directory, options).runner
    prompt = text(length)

    def last_logits(chunk: int) -> Tensor:
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            found = runner.run([Step(0, start, prompt[start:stop])], [1 if stop == length else 0])
        runner.release([0])
        return found

    assert torch.equal(last_logits(CHUNK), last_logits(300))


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_how_queries_are_cut(
    one_thread: None, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 128}
    directory = write(tmp_path, kind, SHORT, **wide)
    options = ModelOptions(dtype="bfloat16", device="cpu", pages=80, attention="invariant")
    prompt, found = text(1_000), []
    for most in (MAX_SCORES, 20_000):
        monkeypatch.setattr("specserve.models.attention_kernels.MAX_SCORES", most)
        found.append(open_model(directory, options).runner.run([Step(0, 0, prompt)], [1_000]))
    assert torch.equal(*found)


@pytest.mark.long
def test_memory_for_a_long_prompt_is_bounded(tmp_path: Path) -> None:
    """Prefill in a process of its own, whose largest size is that of the prefill."""
    many = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 1}
    directory = write(tmp_path, "yarn", LONG, **many, head_dim=16)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(prefill_growth, directory).result() < MAX_GROWTH


def prefill_growth(directory: Path) -> int:
    """Return by how many bytes a process grows while it prefills LONG tokens in chunks."""
    options = ModelOptions(dtype="float32", device="cpu", pages=LONG // PAGE_SIZE)
    runner, prompt = open_model(directory, options).runner, text(LONG)
    wait_until_claimed()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for start in range(0, LONG, CHUNK):
        runner.run([Step(0, start, prompt[start : start + CHUNK])], [1])
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_a_long_shared_prompt_is_prefilled_once(one_thread: None, tmp_path: Path) -> None:
    target = write(tmp_path, "yarn", SHORT)
    shared = text(SHORT - 128)
    prompts = [shared + text(100, seed=seed) for seed in (1, 2, 3)]
    engine = Engine(target, pages=2 * SHORT // PAGE_SIZE)
    cache = engine.target.runner.cache
    for prompt in prompts:
        run = engine.run(greedy([prompt], max_tokens=MAX_TOKENS), gamma=0, max_batch_tokens=CHUNK)
        assert run.texts == [library_text(target, prompt)]
    computed = cache.prefix_queries - cache.prefix_hits
    pages_again = SHORT // CHUNK * PAGE_SIZE  # the last page of each chunk
    assert computed <= len(prompts[0]) + (len(prompts) - 1) * (100 + pages_again)


def test_dynamic_frequencies_end_where_they_would_change(tmp_path: Path) -> None:
    """Frequencies would then depend on the longest text of a pass, and on how prompts are cut."""
    directory = write(tmp_path, "dynamic", SHORT)
    options = ModelOptions(dtype="float32", device="cpu", pages=4, max_context=2 * SHORT)
    assert open_model(directory, options).max_context == SHORT
