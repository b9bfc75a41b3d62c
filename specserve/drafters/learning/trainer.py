"""Training of a copy of the draft's weights, in small steps, and how well it drafts.

Knows no KV cache, no drafter, and no kind of draft: a `TrainableDraft` says what a draft predicts
of a window.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from specserve.drafters.learning.served_texts import Window

LEARNING_RATE = 1e-4
"""Learning rate of AdamW; it is constant, since traffic has no end."""
WARM_UP = 20
"""Steps until the learning rate is reached."""
MIN_TEMPERATURE = 0.5
"""Texts that are cooler, greedy ones too, are learned as if they had this temperature.

Cooler yet, the draft would learn to be surer of its tokens than the target is.
"""
MAX_BATCH = 4
"""Windows that an update of the weights is made of: in one step, or in several shorter ones."""
TARGET_STEP_S = 0.03
"""Steps that take longer on average are made of fewer windows; far shorter ones of more again."""
FIRST_STEPS = 3
"""Steps that are slower than those that follow."""
STEP_BLEND = 0.1
"""Weight of the latest step in the average."""

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Predictions:
    """The tokens that a draft predicts at some positions of windows, and those of the target."""

    logits: Tensor  # [rows, vocab]
    labels: Tensor  # [rows]: the target's token, or -100 where it is not learned
    windows: Tensor  # [rows]: index of the window


class TrainableDraft(Protocol):
    """A draft of some kind as it is trained."""

    @property
    def module(self) -> nn.Module:
        """Module whose parameters are trained, in fp32."""
        ...

    def predict(self, windows: Sequence[Window], weights: Weights | None) -> Predictions:
        """Return what the draft predicts of windows, by other weights than the module's if any."""
        ...


def call_with(module: nn.Module, weights: Weights | None, **inputs: Any) -> Any:
    """Call a module, with other weights than its own unless they are None."""
    if weights is None:
        return module(**inputs)
    return functional_call(module, dict(weights), kwargs=inputs)


class DraftTrainer:
    """A draft in fp32 that learns to write what the target has written."""

    def __init__(self, draft: TrainableDraft, *, learning_rate: float = LEARNING_RATE) -> None:
        self._draft, self._module = draft, draft.module.requires_grad_(True)
        self._learning_rate = learning_rate
        self._device = next(self._module.parameters()).device
        self.batch_size = MAX_BATCH  # windows to give to `step`
        self.step_seconds = 0.0  # on average
        self.num_steps = 0  # updates of the weights
        self._num_timed = 0
        self._new_optimizer()

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
        """Learn from these windows once: cross entropy of the target's own tokens.

        The weights are updated each MAX_BATCH windows; one by one they would follow chance.
        Tokens are drawn at a text's temperature, so the draft's logits are taken at it, too: they
        become those of the target, and not those of cooler texts.
        """
        start = time.perf_counter()
        found = self._draft.predict(windows, None)
        loss = F.cross_entropy(self._at_temperature(found, windows), found.labels, reduction="sum")
        torch.autograd.backward(loss)
        self._num_summed += len(windows)
        self._num_tokens += (found.labels >= 0).sum()
        if self._num_summed >= MAX_BATCH:
            self._update()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._observe(time.perf_counter() - start)

    @torch.no_grad()
    def scores(self, windows: Sequence[Window], weights: Weights | None) -> list[float]:
        """Return for each window the mean log of what q gives to the target's tokens.

        None: by the weights as they are now. It is highest where q is p, as acceptance is. The
        probability itself is not: it grows with how sure the draft is.
        """
        found = self._draft.predict(windows, weights)
        is_new = (found.labels >= 0).float()
        log_q = self._at_temperature(found, windows).log_softmax(-1)
        of_labels = log_q.gather(-1, found.labels.clamp(min=0)[:, None])[:, 0] * is_new
        sums = of_labels.new_zeros(2, len(windows))
        sums.index_add_(1, found.windows, torch.stack([of_labels, is_new]))
        scores: list[float] = (sums[0] / sums[1].clamp(min=1)).tolist()
        return scores

    def _at_temperature(self, found: Predictions, windows: Sequence[Window]) -> Tensor:
        """Return the logits, divided by the temperatures of their windows' texts."""
        temperatures = torch.tensor(
            [max(window.temperature, MIN_TEMPERATURE) for window in windows],
            device=found.logits.device,
        )
        return found.logits.float() / temperatures[found.windows][:, None]

    def _update(self) -> None:
        """Update the weights by the gradients of the steps since the last time."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate * min(1.0, (self._num_since_reset + 1) / WARM_UP)
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                parameter.grad /= self._num_tokens.clamp(min=1)
        torch.nn.utils.clip_grad_norm_(self._module.parameters(), 1.0)
        self._optimizer.step()
        self._clear_gradients()
        self._num_since_reset += 1
        self.num_steps += 1

    def _observe(self, seconds: float) -> None:
        """Average the time of a step, and choose how many windows the next ones have."""
        self._num_timed += 1
        if self._num_timed <= FIRST_STEPS:
            self.step_seconds = seconds
            return
        self.step_seconds += STEP_BLEND * (seconds - self.step_seconds)
        if self.step_seconds > TARGET_STEP_S and self.batch_size > 1:
            self.batch_size //= 2
            self.step_seconds /= 2
        elif self.step_seconds < TARGET_STEP_S / 4 and self.batch_size < MAX_BATCH:
            self.batch_size *= 2
            self.step_seconds *= 2

    def _new_optimizer(self) -> None:
        self._num_since_reset = 0
        self._clear_gradients()
        self._optimizer = torch.optim.AdamW(
            self._module.parameters(),
            lr=self._learning_rate,
            betas=(0.9, 0.99),
            weight_decay=0.0,
        )

    def _clear_gradients(self) -> None:
        self._module.zero_grad(set_to_none=True)
        self._num_summed = 0
        self._num_tokens = torch.zeros((), dtype=torch.long, device=self._device)
