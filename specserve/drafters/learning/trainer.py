"""Training of a copy of the draft's weights, in small steps, by the library's modelling code.

Knows no KV cache and no drafter.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from specserve.drafters.learning.served_texts import Window
from specserve.models.checkpoints.load import load_model

LEARNING_RATE = 3e-4
"""Learning rate of AdamW; it is constant, since traffic has no end."""
WARM_UP = 20
"""Steps until the learning rate is reached."""
MAX_BATCH = 4
"""Windows in a step, if the step is short enough."""
TARGET_STEP_S = 0.03
"""Steps that take longer on average are made of fewer windows; far shorter ones of more again."""
FIRST_STEPS = 3
"""Steps that are slower than those that follow."""
STEP_BLEND = 0.1
"""Weight of the latest step in the average."""

Weights = Mapping[str, Tensor]


def module_vocab(module: Any) -> int:
    """Return the number of ids that a module of the library knows."""
    size: int = module.get_input_embeddings().weight.shape[0]
    return size


@dataclass(frozen=True, slots=True)
class WindowBatch:
    """Windows as tensors; padding stands behind, where nothing attends to it."""

    ids: Tensor  # [windows, longest]
    positions: Tensor  # [windows, longest]
    labels: Tensor  # [windows, longest]: the next token, or -100 where it is not learned
    is_greedy: Tensor  # [windows]

    @classmethod
    def from_windows(cls, windows: Sequence[Window], device: torch.device) -> WindowBatch:
        longest = max(len(window.tokens) for window in windows) - 1
        ids = torch.zeros(len(windows), longest, dtype=torch.long)
        positions = torch.zeros_like(ids)
        labels = torch.full_like(ids, -100)
        for row, window in enumerate(windows):
            tokens = torch.tensor(window.tokens)
            length = len(tokens) - 1
            ids[row, :length] = tokens[:-1]
            positions[row, :length] = window.start + torch.arange(length)
            labels[row, window.first_new - 1 : length] = tokens[window.first_new :]
        is_greedy = torch.tensor([window.is_greedy for window in windows])
        return cls(*(part.to(device) for part in (ids, positions, labels, is_greedy)))


class DraftTrainer:
    """A draft model in fp32 that learns to write what the target has written."""

    def __init__(self, module: torch.nn.Module, *, learning_rate: float = LEARNING_RATE) -> None:
        """Train this module of the library, whose weights are in fp32."""
        module.requires_grad_(True)
        self._module: Any = module
        self._learning_rate = learning_rate
        self._device = next(module.parameters()).device
        self._vocab = module_vocab(self._module)
        self.batch_size = MAX_BATCH  # windows to give to `step`
        self.step_seconds = 0.0  # on average
        self.num_steps = 0
        self._new_optimizer()

    @classmethod
    def from_checkpoint(cls, directory: Path, device: torch.device) -> DraftTrainer:
        return cls(load_model(directory, dtype=torch.float32, device=device).module)

    def weights(self) -> Weights:
        """Return a copy of the weights as they are."""
        return {
            name: parameter.detach().clone() for name, parameter in self._module.named_parameters()
        }

    def reset(self, weights: Weights) -> None:
        """Go on from other weights, as if nothing had been learned since."""
        with torch.no_grad():
            for name, parameter in self._module.named_parameters():
                parameter.copy_(weights[name])
        self._new_optimizer()

    def step(self, windows: Sequence[Window]) -> None:
        """Learn from these windows once: cross entropy of the target's own tokens."""
        start = time.perf_counter()
        batch = WindowBatch.from_windows(self._known(windows), self._device)
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate * min(1.0, (self._num_since_reset + 1) / WARM_UP)
        logits = self._logits(batch, None)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.labels.flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._module.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._num_since_reset += 1
        self.num_steps += 1
        self._observe(time.perf_counter() - start)

    @torch.no_grad()
    def scores(self, windows: Sequence[Window], weights: Weights | None) -> list[float]:
        """Return for each window how likely a draft token is accepted, by these weights at least.

        None: by the weights as they are now. Greedy text accepts the draft's likeliest token if it
        is the target's. Sampled text accepts with sum min(p, q) >= sum p q, whose estimate is the
        probability that q gives to the target's token.
        """
        batch = WindowBatch.from_windows(self._known(windows), self._device)
        logits = self._logits(batch, weights).float()
        is_new = batch.labels >= 0
        labels = batch.labels.clamp(min=0)
        agrees = (logits.argmax(-1) == labels).float()
        probs = logits.softmax(-1).gather(-1, labels[..., None])[..., 0]
        accepted = torch.where(batch.is_greedy[:, None], agrees, probs) * is_new
        scores: list[float] = (accepted.sum(-1) / is_new.sum(-1)).tolist()
        return scores

    def _observe(self, seconds: float) -> None:
        """Average the time of a step, and choose how many windows the next ones have."""
        if self.num_steps <= FIRST_STEPS:
            self.step_seconds = seconds
            return
        self.step_seconds += STEP_BLEND * (seconds - self.step_seconds)
        if self.step_seconds > TARGET_STEP_S and self.batch_size > 1:
            self.batch_size //= 2
            self.step_seconds /= 2
        elif self.step_seconds < TARGET_STEP_S / 4 and self.batch_size < MAX_BATCH:
            self.batch_size *= 2
            self.step_seconds *= 2

    def _logits(self, batch: WindowBatch, weights: Weights | None) -> Tensor:
        given = {"input_ids": batch.ids, "position_ids": batch.positions, "use_cache": False}
        logits: Tensor = (
            self._module(**given)
            if weights is None
            else functional_call(self._module, dict(weights), kwargs=given)
        ).logits
        return logits

    def _known(self, windows: Sequence[Window]) -> list[Window]:
        """Return the windows with those ids replaced that the draft lacks, as in its passes."""
        return [
            window
            if max(window.tokens) < self._vocab
            else Window(
                window.start,
                type(window.tokens)(
                    "i", [token if token < self._vocab else 0 for token in window.tokens]
                ),
                window.first_new,
                window.is_greedy,
            )
            for window in windows
        ]

    def _new_optimizer(self) -> None:
        self._num_since_reset = 0
        self._optimizer = torch.optim.AdamW(
            self._module.parameters(),
            lr=self._learning_rate,
            betas=(0.9, 0.99),
            weight_decay=0.0,
        )
