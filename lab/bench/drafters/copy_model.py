"""A small Llama that learns to rewrite, in minutes on one core. Knows nothing of drafting.

Induction heads do most of the work: they find where the tokens just written stand in the source,
and continue as the source does there. They sharpen sooner on short texts, so lengths grow during
training; and sooner where no other cue helps, so all texts are shuffled names at first, and some of
them later.
"""

from __future__ import annotations

import logging
import math
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lab.bench.drafters.induction import add_induction_heads
from lab.bench.drafters.rewriting import RewritingCorpus, RewritingTask
from lab.bench.train_demo import new_model
from specserve.config.tree import DEMO
from specserve.models.checkpoints.find import describe
from specserve.models.checkpoints.load import load_model

log = logging.getLogger(__name__)
SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "num_hidden_layers": 3,
    "intermediate_size": 384,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
MIN_LENGTH, MAX_LENGTH = 32, 200
"""Tokens of a text."""
BATCH_TOKENS = 1024
LENGTH_GROWTH = 0.3
"""Share of the training after which all lengths occur."""
SHUFFLED_SHARE = 0.15
"""Share of the training in which all texts are shuffled names."""
SHUFFLED_EVERY = 4
"""One text in that many is shuffled names afterwards."""
MUON_RATE, ADAMW_RATE = 0.002, 0.0005


@dataclass(frozen=True, slots=True)
class CopyModel:
    """Trained model on disk, and the corpus that it was trained on."""

    directory: Path
    corpus: RewritingCorpus

    @classmethod
    def load_or_train(
        cls, directory: Path, corpus: RewritingCorpus, budget: TrainingBudget
    ) -> CopyModel:
        """Return the model in `directory`; if there is none, train one and save it there."""
        if not (directory / "config.json").is_file():
            save(train(corpus, budget), directory)
        return cls(directory, corpus)

    @property
    def description(self) -> str:
        spec = describe(self.directory)
        return (
            f"{spec.spec.num_layers} layers and {spec.num_parameters / 1e6:.1f}M parameters"
            " that was trained for this alone"
        )

    def accuracy(self, tasks: Sequence[RewritingTask]) -> tuple[float, float]:
        """Return `greedy_accuracy` of the stored model."""
        return greedy_accuracy(
            load_model(self.directory, dtype=torch.float32, device="cpu").module, tasks
        )


@dataclass(frozen=True, slots=True)
class TrainingBudget:
    """Limits of a training run, which ends at the first that is reached."""

    minutes: float
    steps: int = 10**9


def train(corpus: RewritingCorpus, budget: TrainingBudget) -> Any:
    """Train a model within the budget.

    The rates follow the elapsed share of the budget, so another run gives another model of the same
    kind.
    """
    torch.manual_seed(0)
    model: Any = new_model(SIZES, corpus.end)
    rng = random.Random(0)
    add_induction_heads(model, corpus.end)
    optimizers = _optimizers(model)
    started, step = time.monotonic(), 0
    while (
        progress := max((time.monotonic() - started) / (60 * budget.minutes), step / budget.steps)
    ) < 1:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = answer_loss(model, sample_batch(corpus, progress, rng))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        _step(
            optimizers,
            min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))),
        )
        if step % 50 == 0:
            log.info(
                "%.1f%% of the training, step %d: loss %.4f", 100 * progress, step, loss.item()
            )
        step += 1
    return model.eval()


def sample_batch(
    corpus: RewritingCorpus, progress: float, rng: random.Random
) -> list[RewritingTask]:
    """Sample a batch of texts of equal length, so that no padding is needed."""
    longest = MIN_LENGTH + (MAX_LENGTH - MIN_LENGTH) * min(1.0, progress / LENGTH_GROWTH)
    length = rng.randint(MIN_LENGTH, round(longest))
    return [
        corpus.sample_task(
            length, rng, shuffled=progress < SHUFFLED_SHARE or i % SHUFFLED_EVERY == 0
        )
        for i in range(max(2, BATCH_TOKENS // (2 * length)))
    ]


def answer_loss(model: Any, tasks: Sequence[RewritingTask]) -> Tensor:
    """Return the cross entropy of the answers; prompts do not count."""
    tokens = torch.tensor([task.prompt + task.answer for task in tasks])  # [batch, prompt + answer]
    length = len(tasks[0].answer)
    logits = model(input_ids=tokens[:, :-1], logits_to_keep=length).logits  # [batch, answer, vocab]
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, -length:].flatten())


@torch.inference_mode()
def greedy_accuracy(model: Any, tasks: Sequence[RewritingTask]) -> tuple[float, float]:
    """Return the share of tokens, and of texts, that greedy decoding would get right.

    A token counts if it is the likeliest one after the right text, a text if all its tokens are.
    """
    correct = [_correct_tokens(model, task) for task in tasks]
    return float(torch.cat(correct).float().mean()), sum(bool(one.all()) for one in correct) / len(
        correct
    )


def save(model: Any, directory: Path) -> None:
    """Save the model in bf16, with the demo tokenizer."""
    model.to(torch.bfloat16).save_pretrained(directory)
    for file in TOKENIZER_FILES:
        shutil.copyfile(DEMO / "target" / file, directory / file)


def _correct_tokens(model: Any, task: RewritingTask) -> Tensor:  # [answer]
    logits = model(
        input_ids=torch.tensor([task.prompt + task.answer[:-1]]), logits_to_keep=len(task.answer)
    ).logits[0]
    correct: Tensor = logits.argmax(-1) == torch.tensor(task.answer)
    return correct


def _optimizers(model: Any) -> list[tuple[torch.optim.Optimizer, float]]:
    """Return Muon for the matrices inside the layers and AdamW for the rest, with their rates."""
    named = list(model.named_parameters())
    inside = [parameter for name, parameter in named if parameter.ndim == 2 and "layers" in name]
    rest = [
        parameter for name, parameter in named if not (parameter.ndim == 2 and "layers" in name)
    ]
    muon = torch.optim.Muon(
        inside, lr=MUON_RATE, momentum=0.95, weight_decay=0.0, adjust_lr_fn="original"
    )
    return [
        (muon, MUON_RATE),
        (torch.optim.AdamW(rest, lr=ADAMW_RATE, betas=(0.9, 0.95), weight_decay=0.0), ADAMW_RATE),
    ]


def _step(optimizers: Sequence[tuple[torch.optim.Optimizer, float]], scale: float) -> None:
    """Apply and clear the gradients, at rates scaled by `scale`."""
    for optimizer, rate in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = scale * rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
