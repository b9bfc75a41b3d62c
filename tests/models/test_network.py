"""The fused forward pass, whole and divided among ranks, equals the library's modelling code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from specserve.models.llama import FusedNetwork
from specserve.models.model import open_model
from specserve.models.network import LLAMA_SHAPED, LibraryNetwork
from specserve.models.runner import Runner
from specserve.models.shard import Shard
from specserve.models.target import TargetFollower, TargetModel
from specserve.types import ModelInfo, Policy, PromptScoring, Step, VerifyStep, Warp
from tests.families.configs import FAMILIES
from tests.support import checkpoints
from tests.support.engines import model_options
from tests.support.forks import run_ranks

RANKS = 2
GROUPED = checkpoints.GROUPED
SCALED: dict[str, Any] = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3: dict[str, Any] = {
    **SCALED,
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
CONFIGS: Mapping[str, Callable[[], PreTrainedConfig]] = {
    **{name: {**checkpoints.CONFIGS, **FAMILIES}[name] for name in LLAMA_SHAPED},
    "biases": lambda: LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True),
    # Both ranks hold the one head.
    "one_kv_head": lambda: LlamaConfig(**checkpoints.SIZES, num_key_value_heads=1),
    "own_kv_heads": lambda: LlamaConfig(**checkpoints.SIZES, num_key_value_heads=4),
    "wide_heads": lambda: MistralConfig(**GROUPED, head_dim=32, sliding_window=None),
    "some_windows": lambda: Qwen2Config(
        **GROUPED, use_sliding_window=True, sliding_window=checkpoints.WINDOW, max_window_layers=1
    ),
    "tied": lambda: LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "linear_rope": lambda: LlamaConfig(
        **GROUPED, rope_parameters={**SCALED, "rope_type": "linear"}
    ),
    "llama3_rope": lambda: LlamaConfig(**GROUPED, rope_parameters=LLAMA3),
    "dynamic_rope": lambda: LlamaConfig(
        **GROUPED, rope_parameters={**SCALED, "rope_type": "dynamic"}
    ),
    "yarn_rope": lambda: LlamaConfig(**GROUPED, rope_parameters={**SCALED, "rope_type": "yarn"}),
}
LENGTHS = (1, 40, 150)
TEXTS = [
    tuple(np.random.default_rng(length).integers(3, checkpoints.VOCAB, length).tolist())
    for length in LENGTHS
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("network")
    for name, config in CONFIGS.items():
        checkpoints.write(config(), root / name)
    return root


def open_runner(
    directory: Path, *, fused: bool, dtype: str = "float32", shard: Shard | None = None
) -> Runner:
    with patch("specserve.models.network.can_fuse", return_value=fused):
        runner = open_model(directory, model_options(dtype=dtype, pages=40), shard=shard).runner
    assert isinstance(runner.network, FusedNetwork if fused else LibraryNetwork)
    return runner


def logits(runner: Runner) -> Tensor:  # [sum(LENGTHS), vocab]
    """Return the logits of all positions of the texts, computed together.

    The first pass has all but their last tokens, the second has those.
    """
    body = runner.run(
        [Step(i, 0, text[:-1]) for i, text in enumerate(TEXTS) if len(text) > 1],
        [n - 1 for n in LENGTHS if n > 1],
    )
    last = runner.run(
        [Step(i, len(text) - 1, text[-1:]) for i, text in enumerate(TEXTS)], [1] * len(TEXTS)
    )
    return torch.cat([body, last])


def library_logits(directory: Path) -> Tensor:
    """Return the rows of `logits` from the library, without any of our code."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        rows = [model(input_ids=torch.tensor([text]), use_cache=False).logits[0] for text in TEXTS]
    return torch.cat([*(own[:-1] for own in rows), *(own[-1:] for own in rows)])


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "library"])
@pytest.mark.parametrize("name", CONFIGS)
def test_both_networks_give_the_library_s_logits(root: Path, name: str, fused: bool) -> None:
    expected = library_logits(root / name)
    assert expected.std() > 1
    torch.testing.assert_close(
        logits(open_runner(root / name, fused=fused)), expected, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("name", ["own_kv_heads", "llama", "one_kv_head"])
def test_a_text_alone_gets_the_same_logits(root: Path, name: str) -> None:
    text = TEXTS[-1]
    alone = open_runner(root / name, fused=True).run([Step(0, 0, text)], [len(text)])
    torch.testing.assert_close(
        alone[:-1],
        logits(open_runner(root / name, fused=True))[LENGTHS[1] - 1 : -len(TEXTS)],
        atol=1e-4,
        rtol=1e-4,
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_in_bf16_the_fused_network_is_as_near_to_fp32_as_the_library_s_code(
    root: Path, name: str
) -> None:
    expected = library_logits(root / name)
    found = [logits(open_runner(root / name, fused=own, dtype="bfloat16")) for own in (True, False)]
    fused, library = ((own - expected).std() for own in found)
    assert fused < 1.2 * library < 0.2 * expected.std()
    assert not any(is_rounded(own) for own in found)


def is_rounded(logits: Tensor) -> bool:
    """Return whether these are numbers of bf16, of which many are equal."""
    return torch.equal(logits, logits.bfloat16().to(logits.dtype))


SCORED = (("llama", True), ("tied", False))


def scores(runner: Runner) -> Tensor:  # [tokens]
    """Return the logprobs of the texts' own tokens, read in slices; rank 1 has none."""
    info = ModelInfo(checkpoints.VOCAB, checkpoints.CONTEXT, frozenset(), 16, 40)
    policy = Policy(Warp(), "block", 1, max(LENGTHS))
    steps = [
        VerifyStep(i, 0, text, (), None, policy, scoring=PromptScoring(1, None))
        for i, text in enumerate(TEXTS)
    ]
    with patch("specserve.models.runner.MAX_READ_ROWS", 64):
        if dist.is_initialized() and dist.get_rank():
            TargetFollower(runner, info).verify(steps)
            return torch.empty(0)
        verdicts = TargetModel(runner, info).verify(steps)
    found = [verdict.prompt_logprobs for verdict in verdicts]
    return torch.cat([torch.from_numpy(one.token.copy()) for one in found if one is not None])


# Two ranks

KINDS = [(True, "float32"), (False, "float32"), (True, "bfloat16")]


def rank_main(rank: int, root: str) -> None:
    """Share each model with the other rank in turn; rank 0 saves its logits to a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{root}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=120),
    )
    shard = Shard(rank, RANKS)
    seen: dict[Any, Tensor] = {
        (name, fused, dtype): logits(
            open_runner(Path(root) / name, fused=fused, dtype=dtype, shard=shard)
        )
        for name in CONFIGS
        for fused, dtype in KINDS
    }
    seen |= {
        ("scores", name): scores(open_runner(Path(root) / name, fused=fused, shard=shard))
        for name, fused in SCORED
    }
    if rank == 0:
        torch.save(seen, f"{root}/logits.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def logits_of_two_ranks(root: Path) -> dict[Any, Tensor]:
    run_ranks(rank_main, root, ranks=RANKS)
    return torch.load(root / "logits.pt")  # type: ignore[no-any-return]


@pytest.mark.parametrize(("fused", "dtype"), KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_give_the_logits_of_one(
    root: Path, logits_of_two_ranks: dict[Any, Tensor], name: str, fused: bool, dtype: str
) -> None:
    whole, divided = (
        logits(open_runner(root / name, fused=fused, dtype=dtype)),
        logits_of_two_ranks[name, fused, dtype],
    )
    assert not is_rounded(divided)
    assert (divided - whole).std() < (1e-5 if dtype == "float32" else 0.1) * whole.std()


@pytest.mark.parametrize(("name", "fused"), SCORED)
def test_two_ranks_score_prompts_as_one_does(
    root: Path, logits_of_two_ranks: dict[Any, Tensor], name: str, fused: bool
) -> None:
    whole = scores(open_runner(root / name, fused=fused))
    assert len(whole) == sum(LENGTHS) - len(LENGTHS)
    torch.testing.assert_close(logits_of_two_ranks["scores", name], whole, atol=1e-4, rtol=1e-4)
