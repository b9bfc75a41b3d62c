"""An EAGLE-3 head as it is trained: unrolled over windows of served texts and their states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specserve.drafters.eagle import OpenHead
from specserve.drafters.learning.served_states import StatesWindow
from specserve.drafters.learning.served_texts import Window
from specserve.drafters.learning.trainer import Predictions, Weights, call_with
from specserve.models.eagle.trainable_head import DEPTHS, EagleModule


class TrainableEagle:
    """A head whose first draft token follows from the target's states, as in its training.

    The next DEPTHS - 1 follow from its own, behind the tokens that the target has written.
    """

    def __init__(self, head: OpenHead) -> None:
        device = head.cache.device
        self.module = EagleModule.from_weights(head.weights).to(device)
        self._embedding, self._device = head.embedding, device
        # The head's number of each of the target's tokens; those that it lacks are not learned.
        self._labels = torch.full((head.weights.info.vocab_size,), -100, device=device)
        ids = head.weights.target_ids()
        numbers = torch.arange(head.weights.draft_vocab_size, device=device)
        self._labels[numbers if ids is None else ids.to(device)] = numbers

    def complete(self, window: StatesWindow) -> Window | None:
        """Return the part of a window that has a state behind each token but the last ones."""
        first = len(window.indices) - 1
        while first and window.indices[first - 1] == window.indices[first] - 1:
            first -= 1
        cut = window.indices[first]
        tokens, first_new = window.tokens[cut:], max(1, window.first_new - cut)
        num_rows = min(len(window.indices) - first, len(tokens) - 1 - DEPTHS)
        if num_rows < 1 or num_rows + DEPTHS < first_new:  # no new token would be learned
            return None
        states = window.states[first : first + num_rows].clone()
        return StatesWindow(
            window.start + cut,
            tokens,
            first_new,
            window.temperature,
            states,
            tuple(range(num_rows)),
        )

    def predict(self, windows: Sequence[Window], weights: Weights | None) -> Predictions:
        """Return what the head drafts behind the tokens of windows, at each depth."""
        found = [self._predict(window, weights) for window in windows]
        counts = torch.tensor([len(labels) for _, labels in found], device=self._device)
        return Predictions(
            torch.cat([logits for logits, _ in found]),
            torch.cat([labels for _, labels in found]),
            torch.arange(len(windows), device=self._device).repeat_interleave(counts),
        )

    def _predict(self, window: Window, weights: Weights | None) -> tuple[Tensor, Tensor]:
        """Return log q [predictions, draft vocabulary] and labels of one window."""
        assert isinstance(window, StatesWindow)
        rows = len(window.states)
        ids = torch.tensor(window.tokens[: rows + DEPTHS + 1]).to(self._embedding.device)
        # Row i at depth j predicts token i + j + 2: the first with a new one is the first row here.
        first = max(0, window.first_new - DEPTHS - 1)
        log_q = call_with(
            self.module,
            weights,
            taps=window.states.to(self._device, torch.float32),
            tokens=self._embedding.index_select(0, ids[1:]).float(),
            first=first,
        )
        at = torch.arange(first, rows)[None] + torch.arange(DEPTHS)[:, None] + 2  # [depths, rows]
        at = at.to(self._device)
        labels = self._labels[ids[at]].masked_fill(at < window.first_new, -100)
        return log_q.flatten(0, 1), labels.flatten()
