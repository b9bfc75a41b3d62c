"""Row invariance: a position's logits have the same bits whatever shares its pass.

In bf16 on CPU, for every architecture that the tests make.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from specserve.models.model import ModelOptions, open_model
from specserve.models.runner import Runner
from specserve.types import Step
from tests.support import checkpoints

LENGTH, NUM_TEXTS = 150, 5
# As in every released model: widths of whole vectors, and no product so small that torch's own
# loops would compute it instead of oneDNN.
WIDTHS = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_local_experts": 64,
    "num_experts": 64,
}
BF16 = ModelOptions(dtype="bfloat16", device="cpu", pages=160, prefix_caching=False)


@pytest.fixture(scope="module", params=checkpoints.ARCHITECTURES)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    config = checkpoints.CONFIGS[request.param]()
    for name, value in WIDTHS.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return open_model(
        checkpoints.write(config, tmp_path_factory.mktemp("invariance") / request.param), BF16
    ).runner


@pytest.fixture(scope="module")
def texts() -> list[tuple[int, ...]]:
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(3, checkpoints.VOCAB, LENGTH).tolist()) for _ in range(NUM_TEXTS)]


def feed(
    runner: Runner, texts: list[tuple[int, ...]], rng: np.random.Generator, *, largest: int
) -> list[Tensor]:
    """Return the logits of each text, computed in random chunks of up to `largest` tokens.

    Each pass has a random number of the texts.
    """
    parts: list[list[Tensor]] = [[] for _ in texts]
    done = [0] * len(texts)
    while any(start < LENGTH for start in done):
        waiting = [i for i, start in enumerate(done) if start < LENGTH]
        chosen = rng.permutation(waiting)[: rng.integers(1, len(waiting) + 1)].tolist()
        counts = [min(int(rng.integers(1, largest + 1)), LENGTH - done[i]) for i in chosen]
        logits = runner.run(
            [
                Step(i, done[i], texts[i][done[i] : done[i] + n])
                for i, n in zip(chosen, counts, strict=True)
            ],
            counts,
        )
        for i, n, part in zip(chosen, counts, torch.split(logits, counts), strict=True):
            parts[i].append(part)
            done[i] += n
    runner.release(range(len(texts)))
    return [torch.cat(own) for own in parts]


@pytest.mark.parametrize("largest", [8, LENGTH])
def test_bits_do_not_depend_on_chunks_or_on_other_texts(
    runner: Runner, texts: list[tuple[int, ...]], largest: int
) -> None:
    whole = [feed(runner, [text], np.random.default_rng(0), largest=1)[0] for text in texts]
    mixed = feed(runner, texts, np.random.default_rng(largest), largest=largest)
    differing = sum(int((a != b).any(-1).sum()) for a, b in zip(whole, mixed, strict=True))
    assert differing == 0, f"{differing} of {NUM_TEXTS * LENGTH} positions differ"
