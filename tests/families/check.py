"""Checks of one family: the cells of a row of docs/measurements/families.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from specserve.errors import NoShardingPlan, SpecserveError
from specserve.models.llama import FusedNetwork
from specserve.models.model import ModelOptions, open_model
from specserve.models.runner import Runner
from specserve.models.shard import Shard
from specserve.types import Step
from tests.families.make import reference, write, write_int8
from tests.support import checkpoints
from tests.support.card import emulated_cards
from tests.support.engines import Engine, greedy, model_options

LENGTHS, MAX_TOKENS, GAMMA = (1, 20, 50), 10, 3
DRAFT_NOISE = 0.05
WIDTHS = {  # whole vectors, and products that oneDNN computes: as in every released model
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 128,
    "intermediate_size_mlp": 128,
    "ffn_hidden_size": 256,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
IMAGE_IDS = 10
"""Tokens below stand for images, or begin and end them."""


@dataclass(frozen=True, slots=True)
class Row:
    """The columns that hold for a family."""

    opens: bool
    tensor_parallel: bool
    quantized: bool
    graph: bool
    fused: bool
    greedy: bool
    invariant: bool

    @property
    def cells(self) -> list[str]:
        return ["yes" if getattr(self, one.name) else "no" for one in fields(self)]


def check(name: str, root: Path) -> Row:
    """Make a checkpoint of a family, and try each column on it."""
    directory = write(name, root / name)
    runner = open_runner(directory)
    expected = logits(runner)
    library = reference_logits(directory)
    assert library.std() > 1
    return Row(
        opens=is_close(expected, library),
        tensor_parallel=ranks_agree(directory, expected),
        quantized=int8_is_widened(directory, root),
        graph=is_captured(directory, expected),
        fused=isinstance(runner.network, FusedNetwork),
        greedy=texts_are_the_library_s(directory, root / f"{name}_draft"),
        invariant=bits_are_invariant(write(name, root / f"{name}_wide", **WIDTHS)),
    )


def prompts(lengths: Sequence[int] = LENGTHS) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(IMAGE_IDS, 280, length).tolist()) for length in lengths]


def open_runner(directory: Path, **options: Any) -> Runner:
    return open_model(directory, model_options(pages=40), **options).runner


def logits(runner: Runner) -> Tensor:  # [positions, vocab]
    """Return the logits of a text's positions, computed in two chunks."""
    text = prompts()[-1]
    parts = [runner.run([Step(0, 0, text[:30])], [30]), runner.run([Step(0, 30, text[30:])], [20])]
    runner.release([0])
    return torch.cat(parts).cpu()


def reference_logits(directory: Path) -> Tensor:
    with torch.inference_mode():
        ids = torch.tensor([prompts()[-1]])
        out: Tensor = reference(directory)(input_ids=ids, use_cache=False).logits[0]
    return out


def is_close(found: Tensor, expected: Tensor, tolerance: float = 5e-4) -> bool:
    return bool(torch.allclose(found, expected, atol=tolerance, rtol=tolerance))


def ranks_agree(directory: Path, expected: Tensor) -> bool:
    """Return whether two ranks compute the model together."""
    try:
        with ranks_of(directory) as run:
            found, _ = run(logits)
    except NoShardingPlan:
        return False
    return is_close(found, expected)


@contextmanager
def ranks_of(
    directory: Path, size: int = 2, *, gathers: bool = False
) -> Iterator[Callable[[Callable[[Runner], Any]], list[Any]]]:
    """Open a model on ranks, which are threads here; what is yielded runs a function on all."""
    store: Any = cast(Any, dist).HashStore()

    def join(rank: int) -> Shard:
        backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
        group: Any = dist.ProcessGroup(store, rank, size)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        return Shard(rank, size, group, gathers)

    with ThreadPoolExecutor(size) as threads:
        shards = list(threads.map(join, range(size)))
        runners = [open_runner(directory, shard=shard) for shard in shards]
        yield lambda function: list(threads.map(function, runners))


def _last_row(runner: Runner, step: Step) -> Tensor:  # [vocab]
    return runner.run([step], [1])[0]


def ranks_write_the_library_s_texts(directory: Path, size: int, *, gathers: bool = False) -> bool:
    """Return whether ranks together write the greedy texts of generate()."""
    model = reference(directory)
    with ranks_of(directory, size, gathers=gathers) as run:
        for seq_id, prompt in enumerate(prompts()):
            text, start = list(prompt), 0
            while len(text) < len(prompt) + MAX_TOKENS:
                step = Step(seq_id, start, tuple(text[start:]))
                row, *_ = run(partial(_last_row, step=step))
                start = len(text)
                text.append(int(row.argmax()))
            if tuple(text[len(prompt) :]) != _continued(model, prompt):
                return False
    return True


def int8_is_widened(directory: Path, root: Path) -> bool:
    """Return whether an INT8 copy gives the logits of the matrices that it stands for."""
    quantized, widened = (root / f"{directory.name}_{kind}" for kind in ("int8", "widened"))
    if not write_int8(directory, quantized, widened):
        return False
    try:
        found = logits(open_runner(quantized))
    except SpecserveError:
        return False
    return is_close(found, logits(open_runner(widened)))


def is_captured(directory: Path, expected: Tensor) -> bool:
    """Return whether passes on an emulated card are captured as graphs, and replay what is right.

    Each token is a pass of its own, after the first that is captured.
    """
    options = ModelOptions(
        dtype="float32", device="cuda", pages=40, prefix_caching=False, attention="sdpa"
    )
    text = prompts()[-1][:6]
    with emulated_cards() as ledger:
        runner = open_model(directory, options).runner
        rows = [runner.run([Step(0, i, text[i : i + 1])], [1]).cpu() for i in range(len(text))]
        is_replayed = ledger.num_replays > 1
    assert is_close(torch.cat(rows), expected[: len(text)])
    return is_replayed


def texts_are_the_library_s(directory: Path, draft: Path) -> bool:
    """Return whether greedy texts, plain and speculative, equal the texts of generate()."""
    model = reference(directory)
    expected = [_continued(model, prompt) for prompt in prompts()]
    engine = Engine(directory, checkpoints.perturb(directory, draft, DRAFT_NOISE), pages=60)
    runs = [
        engine.run(greedy(prompts(), max_tokens=MAX_TOKENS), gamma=gamma) for gamma in (0, GAMMA)
    ]
    assert runs[1].drafted > 0
    return all(run.texts == expected for run in runs)


def _continued(model: Any, prompt: Sequence[int]) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False
    )
    return tuple(out[0, len(prompt) :].tolist())


def bits_are_invariant(directory: Path) -> bool:
    """Return whether each text has the same bits alone, token by token, and in company."""
    options = ModelOptions(dtype="bfloat16", device="cpu", pages=40, prefix_caching=False)
    runner = open_model(directory, options).runner
    texts = prompts((24, 24, 24, 24))
    alone = [runner.run([Step(0, i, texts[0][i : i + 1])], [1]) for i in range(24)]
    runner.release([0])
    together = []
    for start, stop in ((0, 5), (5, 6), (6, 24)):
        steps = [Step(i, start, text[start:stop]) for i, text in enumerate(texts)]
        rows = runner.run(steps, [stop - start] * len(texts))
        together.append(rows[: stop - start])
    return torch.equal(torch.cat(alone), torch.cat(together))


def fused_is_the_library_s(directory: Path) -> bool:
    """Return whether the fused network gives the numbers of the library's code."""
    with patch("specserve.models.network.can_fuse", return_value=False):
        expected = logits(open_runner(directory))
    return is_close(logits(open_runner(directory)), expected)
