"""A draft model as it is trained: by the library's modelling code, over whole windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specserve.drafters.learning.served_texts import Window
from specserve.drafters.learning.trainer import Predictions, Weights, call_with
from specserve.models.checkpoints.load import load_model


class TrainableModel:
    """A module of the library; its weights have the names of the checkpoint's module."""

    def __init__(self, module: nn.Module) -> None:
        """Train this module, whose weights are in fp32."""
        self.module = module
        self._device = next(module.parameters()).device
        library: Any = module
        self._vocab: int = library.get_input_embeddings().weight.shape[0]  # ids that it knows

    @classmethod
    def from_checkpoint(cls, directory: Path, device: torch.device) -> TrainableModel:
        return cls(load_model(directory, dtype=torch.float32, device=device).module)

    def predict(self, windows: Sequence[Window], weights: Weights | None) -> Predictions:
        """Return what the model predicts behind each token; padding stands behind the windows."""
        windows = self._known(windows)
        longest = max(len(window.tokens) for window in windows) - 1
        ids = torch.zeros(len(windows), longest, dtype=torch.long)
        positions, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for row, window in enumerate(windows):
            tokens = torch.tensor(window.tokens)
            length = len(tokens) - 1
            ids[row, :length] = tokens[:-1]
            positions[row, :length] = window.start + torch.arange(length)
            labels[row, window.first_new - 1 : length] = tokens[window.first_new :]
        ids, positions, labels = (part.to(self._device) for part in (ids, positions, labels))
        logits = call_with(
            self.module, weights, input_ids=ids, position_ids=positions, use_cache=False
        ).logits
        owners = torch.arange(len(windows), device=self._device).repeat_interleave(longest)
        return Predictions(logits.flatten(0, 1), labels.flatten(), owners)

    def _known(self, windows: Sequence[Window]) -> list[Window]:
        """Return the windows with those ids replaced that the draft lacks, as in its passes."""
        return [
            window
            if max(window.tokens) < self._vocab
            else replace(
                window,
                tokens=type(window.tokens)(
                    "i", [token if token < self._vocab else 0 for token in window.tokens]
                ),
            )
            for window in windows
        ]
