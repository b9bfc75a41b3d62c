"""Draft heads as they are trained: on the states that they have drafted from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specserve.drafters.learning.served_states import StatesWindow
from specserve.drafters.learning.served_texts import Window
from specserve.drafters.learning.trainer import Predictions, Weights, call_with
from specserve.models.heads import Heads


class TrainableHeads:
    """Heads over the target's embedding and vocabulary head, which stay as they are."""

    def __init__(
        self,
        heads: Heads,
        embed: Callable[[Tensor], Tensor],  # [rows] -> [rows, hidden]
        vocabulary_head: Tensor,  # [vocab, hidden]
    ) -> None:
        self.module = Heads(heads.num_heads, heads.weight.shape[-1]).to(heads.weight.device)
        self.module.load_state_dict(heads.state_dict())
        self._embed, self._vocabulary_head = embed, vocabulary_head

    def complete(self, window: StatesWindow) -> Window | None:
        """Return the window with the states that new tokens are drafted from, if there are any."""
        stop, first = len(window.tokens), window.first_new - 1 - self.module.num_heads
        rows = [row for row, i in enumerate(window.indices) if first <= i < stop - 2]
        indices = tuple(window.indices[row] for row in rows)
        return replace(window, states=window.states[rows], indices=indices) if rows else None

    def predict(self, windows: Sequence[Window], weights: Weights | None) -> Predictions:
        """Return the predictions of each head behind each state, the heads of a state in order."""
        states, newest, labels, counts = [], [], [], []
        for window in windows:
            assert isinstance(window, StatesWindow)
            states.append(window.states)
            newest += [window.tokens[i + 1] for i in window.indices]
            for i in window.indices:
                labels += self._labels(window, i + 2)
            counts.append(len(window.indices) * self.module.num_heads)
        device = self._vocabulary_head.device
        with torch.no_grad():
            embedded = self._embed(torch.tensor(newest, device=device))
        predicted = call_with(
            self.module,
            weights,
            hidden=torch.cat(states).float(),
            newest=embedded.float(),
        )  # [heads, rows, hidden]
        out = predicted.transpose(0, 1).flatten(0, 1).to(self._vocabulary_head.dtype)
        owners = torch.arange(len(windows)).repeat_interleave(torch.tensor(counts))
        return Predictions(
            out @ self._vocabulary_head.T,
            torch.tensor(labels, device=device),
            owners.to(device),
        )

    def _labels(self, window: Window, first: int) -> list[int]:
        """Return what the heads should have drafted from index `first` on, -100 if not learned."""
        return [
            window.tokens[i] if window.first_new <= i < len(window.tokens) else -100
            for i in range(first, first + self.module.num_heads)
        ]
