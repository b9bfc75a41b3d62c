"""A small Llama that learns to rewrite, in minutes on one core. Knows nothing of drafting.

Induction heads are most of what it needs: find where what was just written stands in the source, and go on as it does there. They grow sharp sooner
on short texts, so lengths grow; and sooner where nothing else helps, so texts are names in no order at first, and some of them later.
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

from benchmarks.drafters.induction import induce
from benchmarks.drafters.rewriting import Rewriting, Task
from benchmarks.train_demo import new_model
from specserve.config.tree import DEMO
from specserve.models.checkpoints.describe import describe
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
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
SHORTEST, LONGEST = 32, 200  # tokens of a text
TOKENS = 1024  # of a batch
GROWN = 0.3  # of the lessons, after which all lengths are met
SHUFFLED, THEN = (
    0.15,
    4,
)  # of the lessons, in which all texts are names in no order; after which every fourth is
MATRICES, REST = 0.002, 0.0005  # rates of Muon and AdamW


@dataclass(frozen=True, slots=True)
class Copyist:
    """A trained model on disk, and the tasks that it was trained on."""

    directory: Path
    rewriting: Rewriting

    @classmethod
    def found(cls, directory: Path, rewriting: Rewriting, course: Course) -> Copyist:
        """In the directory, or else trained and kept there."""
        if not (directory / "config.json").is_file():
            keep(train(rewriting, course), directory)
        return cls(directory, rewriting)

    @property
    def described(self) -> str:
        spec = describe(self.directory)
        return f"{spec.spec.num_layers} layers and {spec.num_parameters / 1e6:.1f}M parameters that was trained for this alone"

    def right(self, tasks: Sequence[Task]) -> tuple[float, float]:
        """As `agreement` has it."""
        return agreement(
            load_model(self.directory, dtype=torch.float32, device="cpu").module, tasks
        )


@dataclass(frozen=True, slots=True)
class Course:
    """Ends by whichever comes first."""

    minutes: float
    steps: int = 10**9


def train(rewriting: Rewriting, course: Course) -> Any:
    """The rates follow the elapsed share of the course, so another run gives another model of the same kind."""
    torch.manual_seed(0)
    model: Any = new_model(SIZES, rewriting.end)
    chance = random.Random(0)
    induce(model, rewriting.end)
    optimizers = _optimizers(model)
    begun, step = time.monotonic(), 0
    while (
        progress := max((time.monotonic() - begun) / (60 * course.minutes), step / course.steps)
    ) < 1:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = lesson(model, drawn(rewriting, progress, chance))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        _advance(
            optimizers,
            min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))),
        )
        if step % 50 == 0:
            log.info("%.1f%% of the lessons, step %d: loss %.4f", 100 * progress, step, loss.item())
        step += 1
    return model.eval()


def drawn(rewriting: Rewriting, progress: float, chance: random.Random) -> list[Task]:
    """A batch of texts of one length, so that nothing is padded."""
    longest = SHORTEST + (LONGEST - SHORTEST) * min(1.0, progress / GROWN)
    length = chance.randint(SHORTEST, round(longest))
    return [
        rewriting.drawn(length, chance, shuffled=progress < SHUFFLED or i % THEN == 0)
        for i in range(max(2, TOKENS // (2 * length)))
    ]


def lesson(model: Any, tasks: Sequence[Task]) -> Tensor:
    """The loss of the answers alone."""
    tokens = torch.tensor([task.prompt + task.answer for task in tasks])  # [batch, prompt + answer]
    wanted = len(tasks[0].answer)
    logits = model(input_ids=tokens[:, :-1], logits_to_keep=wanted).logits  # [batch, answer, vocab]
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, -wanted:].flatten())


@torch.inference_mode()
def agreement(model: Any, tasks: Sequence[Task]) -> tuple[float, float]:
    """Of tokens that are likeliest behind the right text, and of texts in which all are: those that greedy decoding would get right."""
    right = [_right(model, task) for task in tasks]
    return float(torch.cat(right).float().mean()), sum(bool(one.all()) for one in right) / len(
        right
    )


def keep(model: Any, directory: Path) -> None:
    """In bf16, with the demo tokenizer."""
    model.to(torch.bfloat16).save_pretrained(directory)
    for file in TOKENIZER:
        shutil.copyfile(DEMO / "target" / file, directory / file)


def _right(model: Any, task: Task) -> Tensor:  # [answer]
    logits = model(
        input_ids=torch.tensor([task.prompt + task.answer[:-1]]), logits_to_keep=len(task.answer)
    ).logits[0]
    right: Tensor = logits.argmax(-1) == torch.tensor(task.answer)
    return right


def _optimizers(model: Any) -> list[tuple[torch.optim.Optimizer, float]]:
    """With the usual rates: Muon for the matrices inside the layers, AdamW for the rest."""
    named = list(model.named_parameters())
    inside = [parameter for name, parameter in named if parameter.ndim == 2 and "layers" in name]
    rest = [
        parameter for name, parameter in named if not (parameter.ndim == 2 and "layers" in name)
    ]
    muon = torch.optim.Muon(
        inside, lr=MATRICES, momentum=0.95, weight_decay=0.0, adjust_lr_fn="original"
    )
    return [
        (muon, MATRICES),
        (torch.optim.AdamW(rest, lr=REST, betas=(0.9, 0.95), weight_decay=0.0), REST),
    ]


def _advance(optimizers: Sequence[tuple[torch.optim.Optimizer, float]], share: float) -> None:
    for optimizer, usual in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = share * usual
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
