"""Draft heads: blocks on a target's last hidden state that predict several tokens, and their files.

They are Medusa's (2401.10774), but each head also sees the newest token, which costs nothing: it is
known before any head runs. So all heads of all sequences are one batched product, and one pass of
the target's own vocabulary head. Knows no sequences and no sampling.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from specserve.errors import ModelError, ModelNotFound
from specserve.models.checkpoints.weights import fingerprint

WEIGHTS, INFO = "heads.safetensors", "heads.json"


@dataclass(frozen=True, slots=True)
class HeadsInfo:
    """The model that heads fit to."""

    num_heads: int
    hidden_size: int
    vocab_size: int
    target: str  # its fingerprint


class Heads(nn.Module):
    """All heads of a target.

    Head k predicts the k-th token after the newest one, from the hidden state that the newest one
    was chosen from.
    """

    def __init__(self, num_heads: int, hidden_size: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.weight = nn.Parameter(torch.zeros(num_heads, 2 * hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(num_heads, 1, hidden_size))

    def forward(
        self, hidden: Tensor, newest: Tensor
    ) -> Tensor:  # both [rows, hidden] -> [heads, rows, hidden]
        """Return the input of the vocabulary head.

        `newest` are the embeddings of the tokens that were chosen from the hidden states.
        """
        size = hidden.shape[-1:]
        seen = torch.cat([F.rms_norm(hidden, size), F.rms_norm(newest, size)], dim=-1).expand(
            self.num_heads, -1, -1
        )
        return hidden + F.silu(torch.baddbmm(self.bias, seen, self.weight))


def save_heads(heads: Heads, info: HeadsInfo, directory: Path) -> None:
    """Save heads in bf16, which is precise enough for a draft."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {
            name: tensor.to(torch.bfloat16).contiguous()
            for name, tensor in heads.state_dict().items()
        },
        directory / WEIGHTS,
    )
    (directory / INFO).write_text(json.dumps(asdict(info), indent=2) + "\n")


def require_heads_for(target: Path, directory: Path) -> HeadsInfo:
    """Return what the heads in a directory fit to; raise ModelError unless that is this target.

    Reads no weights of the target but its norms.
    """
    info = _info(directory)
    if info.target != fingerprint(target):
        raise ModelError(
            f"the heads at {directory} were fitted to another target than {target}; "
            "`specserve heads` fits heads to this one"
        )
    return info


def load_heads(directory: Path, *, dtype: torch.dtype, device: torch.device) -> Heads:
    info = _info(directory)
    heads = Heads(info.num_heads, info.hidden_size)
    try:
        heads.load_state_dict(load_file(directory / WEIGHTS))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ModelError(
            f"{directory / WEIGHTS} does not hold the heads that {INFO} states: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return heads.to(device, dtype).eval().requires_grad_(False)


def _info(directory: Path) -> HeadsInfo:
    file = directory / INFO
    if not file.is_file():
        raise ModelNotFound(
            f"there are no heads at {directory}; `specserve heads` fits them to a target"
        )
    try:
        return HeadsInfo(**json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise ModelError(f"{file} does not say what the heads fit to: {error}") from error
