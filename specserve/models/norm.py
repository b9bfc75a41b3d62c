"""Norm of hidden states in as few operations as the device has."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.models.cpu.linear_kernels import CompiledKernel
from specserve.models.gpu.card_kernels import card_kernels
from specserve.models.layers import can_pack, kernel_of


class RMSNorm:
    """The norm x / sqrt(mean(x^2) + eps) * weight.

    Where nothing is compiled for the CPU, it is computed by `layer_norm`: beside its own negative x
    has mean 0, so that its variance there is its mean square. That takes one kernel, not six.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps, self.width = weight.detach(), eps, weight.shape[0]
        kernel = kernel_of(weight.dtype) if can_pack(weight) else None
        self.compiled = kernel if isinstance(kernel, CompiledKernel) else None
        self.mirrored = (
            torch.cat([self.weight, self.weight]) if weight.device.type == "cpu" else None
        )
        is_on_gpu = weight.device.type == "cuda"
        self.on_card = card_kernels(weight.device, weight.dtype) if is_on_gpu else None

    def __call__(self, x: Tensor) -> Tensor:  # [..., width]
        if self.compiled is not None:
            return self.compiled.rms_norm(x, self.weight, self.eps)
        if self.on_card is not None and x.dim() == 2 and x.stride(1) == 1:
            return self.on_card.rms_norm(x, self.weight, self.eps)
        if self.mirrored is None:
            return F.rms_norm(x, (self.width,), self.weight, self.eps)
        both = torch.layer_norm(
            torch.cat((x, x.neg()), dim=-1), (2 * self.width,), self.mirrored, None, self.eps
        )
        return both.narrow(-1, 0, self.width)
