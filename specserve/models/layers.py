"""Linear layers in as few operations as the device has.

On CPU in bf16 and float32, linear weights are packed once into the processor's own layout and then
read at the speed of memory; elsewhere layers are plain.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specserve.models.cpu.linear_kernels import LinearKernel, linear_kernel
from specserve.models.cpu.mapped_file import tensor_address
from specserve.models.cpu.row_invariance import is_row_invariant, row_invariant_kernel
from specserve.models.float8_weight import Float8Weight, float8_of, join_float8
from specserve.models.gpu.card_kernels import card_kernels
from specserve.models.gpu.float8_kernels import float8_product
from specserve.models.memory import use_huge_pages


class LinearWeights(Protocol):
    """The memory of linear layers' weights, which they ask for in the order of construction."""

    @property
    def kernel(self) -> LinearKernel:
        """The kernel of all layers in bf16 at whose shape it is row-invariant."""
        ...

    def pack(self, weight: Tensor, kernel: LinearKernel) -> Tensor:
        """Return a weight [out, in] as a layer's kernel reads it."""
        ...

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a bias, or a weight that is not packed."""
        ...


class PrivateWeights:
    """Weights in this process's own memory."""

    def __init__(self, kernel: str = "auto") -> None:
        self._kernel = kernel

    @property
    def kernel(self) -> LinearKernel:
        return linear_kernel(self._kernel)

    def pack(self, weight: Tensor, kernel: LinearKernel) -> Tensor:
        packed = kernel.pack(weight.detach())
        use_huge_pages(tensor_address(packed), packed.numel() * packed.element_size())
        return packed

    def keep(self, tensor: Tensor) -> Tensor:
        return tensor.detach()


PRIVATE_WEIGHTS = PrivateWeights()
# The choice is the same for all layers of a network, whose constructors would only hand it on.
_linear_weights: ContextVar[LinearWeights] = ContextVar("weights", default=PRIVATE_WEIGHTS)
_failed_shapes: ContextVar[set[tuple[int, int]] | None] = ContextVar("failed", default=None)


@contextmanager
def linear_weights(weights: LinearWeights) -> Iterator[set[tuple[int, int]]]:
    """Take the weights of the linear layers that are made meanwhile from `weights`.

    Yields the shapes [in, out] of layers among them at which no kernel is row-invariant.
    """
    failed = set[tuple[int, int]]()
    token, failed_token = _linear_weights.set(weights), _failed_shapes.set(failed)
    try:
        yield failed
    finally:
        _linear_weights.reset(token)
        _failed_shapes.reset(failed_token)


def current_weights() -> LinearWeights:
    """Return where the layers that are made now keep their weights."""
    return _linear_weights.get()


def can_pack(weight: Tensor) -> bool:
    """Return whether a weight is packed; one on the meta device stands for one on the CPU."""
    return weight.device.type in ("cpu", "meta") and is_packed_format(weight.dtype)


def is_packed_format(dtype: torch.dtype) -> bool:
    """Return whether weights in a number format are packed on CPUs."""
    return dtype in (torch.bfloat16, torch.float32) and torch._C._has_mkldnn


class PackedLinear(nn.Module):
    """The product x W^T + b with a packed weight.

    Row-invariant: a row's result does not depend on how many rows come with it. It has the rows'
    number format, or float32 if it `is_unrounded`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.is_unrounded = False
        self.out_features, self.in_features = weight.shape
        weights, self.kernel = current_weights(), kernel_for(weight)
        self.weight = weights.pack(weight, self.kernel)
        self.bias = None if bias is None else weights.keep(bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        given = rows, self.weight, self.out_features, self.bias
        out = (
            self.kernel.unrounded_product(*given)
            if self.is_unrounded
            else self.kernel.product(*given, None)
        )
        return out if x.dim() == 2 else out.view(*x.shape[:-1], self.out_features)

    def add_to_residual(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return residual + x W^T + b of rows [n, in], in one operation."""
        return self.kernel.product(x, self.weight, self.out_features, self.bias, residual)


class PlainLinear(nn.Module):
    """The interface of `PackedLinear` where packing does not apply."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        weights = current_weights()
        self.weight = weights.keep(weight)
        self.bias = None if bias is None else weights.keep(bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add_to_residual(self, x: Tensor, residual: Tensor) -> Tensor:
        if x.is_cuda and self.bias is None:
            return residual.addmm_(x, self.weight.t())  # within the product, without a copy
        return residual + F.linear(x, self.weight, self.bias)


class Float8Linear(nn.Module):
    """The product x W^T + b in bf16 with an FP8 weight, on GPUs that have such products.

    Rows are rounded to FP8, too, as the weight says.
    """

    def __init__(self, weight: Float8Weight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.codes.shape
        weights = current_weights()
        self.float8 = replace(
            weight, codes=weights.keep(weight.codes), scales=weights.keep(weight.scales)
        )
        self.weight = self.float8.codes
        self.bias = None if bias is None else weights.keep(bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        out = float8_product(rows, self.float8, self.bias)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], self.out_features)

    def add_to_residual(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self.forward(x)


AnyLinear = PackedLinear | PlainLinear | Float8Linear


class ScaledLinear:
    """A linear layer whose output is scaled before it is added to the residual."""

    def __init__(self, linear: AnyLinear, scale: float) -> None:
        self.linear, self.scale = linear, scale

    def forward(self, x: Tensor) -> Tensor:
        return self.linear.forward(x) * self.scale

    def add_to_residual(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self.forward(x)


class PackedGate(nn.Module):
    """The product silu(x G^T) * (x U^T) of a gated MLP, with packed weights."""

    def __init__(self, gate: Tensor, up: Tensor) -> None:
        super().__init__()
        self.out_features, self.in_features = gate.shape
        weights, self.kernel = current_weights(), kernel_for(gate)
        self.weight = weights.pack(self.kernel.interleave(gate, up), self.kernel)

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel.gated_product(x, self.weight, self.out_features)


class PlainGate(nn.Module):
    """The interface of `PackedGate` where packing does not apply, or where there is a bias."""

    def __init__(self, both: AnyLinear) -> None:
        super().__init__()
        self.both, weight = both, both.weight
        dtype = torch.bfloat16 if isinstance(both, Float8Linear) else weight.dtype
        self.kernels = card_kernels(weight.device, dtype) if weight.is_cuda else None

    def forward(self, x: Tensor) -> Tensor:
        both = self.both.forward(x)
        if self.kernels is not None:
            return self.kernels.gated(both)
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def kernel_of(dtype: torch.dtype) -> LinearKernel:
    """Return the kernel of the layers that are made now in a number format that is packed."""
    is_choice = dtype == torch.bfloat16
    return current_weights().kernel if is_choice else linear_kernel(dtype=dtype)


def kernel_for(weight: Tensor) -> LinearKernel:
    """Return the kernel of a layer with that weight [out, in]."""
    outer, inner = weight.shape
    kernel = row_invariant_kernel(kernel_of(weight.dtype), inner, outer, weight.dtype)
    failed = _failed_shapes.get()
    if failed is not None and not is_row_invariant(kernel, inner, outer, weight.dtype):
        failed.add((inner, outer))
    return kernel


def make_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear | PlainLinear:
    return PackedLinear(weight, bias) if can_pack(weight) else PlainLinear(weight, bias)


def join_linears(parent: Any, *names: str) -> AnyLinear:
    """Join several linear layers that have the same input into one.

    The originals are dropped, so that memory holds the weights once.
    """
    parts = [getattr(parent, name) for name in names]
    small = [weight for part in parts if (weight := float8_of(part)) is not None]
    bias = torch.cat([part.bias.detach() for part in parts]) if parts[0].bias is not None else None
    for name in names:
        setattr(parent, name, None)
    if len(small) == len(parts):
        return Float8Linear(join_float8(small), bias)
    return make_linear(torch.cat([_plain_weight(part) for part in parts]), bias)


def take_gate(parent: Any, gate: str, up: str) -> PackedGate | PlainGate:
    """Return what joins the two first linear layers of a gated MLP, which are dropped."""
    parts = [getattr(parent, name) for name in (gate, up)]
    if parts[0].bias is not None or not can_pack(parts[0].weight):
        return PlainGate(join_linears(parent, gate, up))
    for name in (gate, up):
        setattr(parent, name, None)
    return PackedGate(*(part.weight.detach() for part in parts))


def take_linear(parent: Any, name: str) -> AnyLinear:
    """Return a linear layer of ours in place of `parent`'s, which is dropped."""
    part = getattr(parent, name)
    setattr(parent, name, None)
    small = float8_of(part)
    return make_linear(part.weight, part.bias) if small is None else Float8Linear(small, part.bias)


def _plain_weight(part: Any) -> Tensor:
    small = float8_of(part)
    weight: Tensor = part.weight.detach() if small is None else small.widen(torch.bfloat16)
    return weight


def pack_linears(module: nn.Module) -> None:
    """Replace every linear layer of a model that can be packed, or whose weight is in FP8.

    The originals are freed one by one, so that memory hardly grows.
    """
    children: list[tuple[str, Any]] = list(module.named_children())
    for name, child in children:
        weight = weight_of_linear(child)
        if weight is None:
            pack_linears(child)
            continue
        if (small := float8_of(child)) is not None:
            setattr(module, name, Float8Linear(small, child.bias))
        elif can_pack(weight):
            setattr(module, name, PackedLinear(weight, child.bias))


def take_head(parent: Any) -> nn.Module:
    """Return the vocabulary head of a model in place of its own, with unrounded logits."""
    pack_linears(parent.lm_head)  # a rank's share is nested; the whole head is a plain linear
    is_whole = isinstance(parent.lm_head, nn.Linear)
    head: nn.Module = take_linear(parent, "lm_head") if is_whole else parent.lm_head
    leave_unrounded(head)
    return head


def leave_unrounded(head: nn.Module) -> None:
    """Make a vocabulary head whose weight is packed return its logits in float32.

    In bf16 close ones would round to the same number, and the lowest id of these be the likeliest.
    """
    for part in head.modules():
        if isinstance(part, PackedLinear):
            part.is_unrounded = True


def weight_of_linear(module: Any) -> Tensor | None:  # [out, in]
    """Return the weight of a linear layer, the kinds of GPT-2 and Falcon included; else None."""
    kind = type(module)
    if kind is nn.Linear or kind.__name__ == "FalconLinear":
        return module.weight  # type: ignore[no-any-return]
    return module.weight.t() if kind.__name__ == "Conv1D" else None


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Attention heads of this rank: how many of each sort, and their dimension."""

    query: int
    kv: int
    dim: int
