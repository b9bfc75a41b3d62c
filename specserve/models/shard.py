"""Tensor parallelism from outside: the part of each parameter that a rank holds, and the sums.

Plain tensors, one sum over the ranks after each row-wise layer. Knows no files, and of
architectures no more than their plans.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from specserve.errors import NoShardingPlan
from specserve.models.checkpoints.weights import Range
from specserve.models.plans import (
    ANY,
    HEADS,
    KV_HEADS,
    OWN_PLANS,
    STYLES,
    Cut,
    HeadCounts,
    Style,
    check_plan,
    gathered_plan,
    plan_for,
)

EXCHANGED_BYTES = 1 << 20
"""Size from which each rank adds a share of the elements, where gathering all costs more."""
# torch renamed it in 2.13.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class RowWiseLinear(Protocol):
    """A linear layer whose inputs are divided among the ranks."""

    def forward(self, x: Tensor) -> Tensor: ...
    def add_to_residual(self, x: Tensor, residual: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of those that share a model. The group None is the default process group.

    Where it `gathers`, row-wise layers gather their inputs, of which each rank computes a share of
    the outputs: no sum depends on the number of ranks. Else each rank has a share of the inputs,
    and their outputs are summed.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None = None
    gathers: bool = False

    def add_to_residual(self, linear: RowWiseLinear, x: Tensor, residual: Tensor) -> Tensor:
        """Return the residual plus a row-wise layer's output: x is this rank's part [rows, n]."""
        if not self.gathers:
            return residual + self.sum(linear.forward(x))
        own = residual.chunk(self.size, dim=-1)[self.rank].contiguous()
        return self.join(linear.add_to_residual(self.join(x), own))

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum over the ranks, on CPUs added in rank order; `partial` is lost.

        An all-reduce of three ranks or more adds in an order that depends on the number of rows, as
        the products of GPUs do anyway. Two ranks take one addition, which has no order.
        """
        if self.size <= 2 or partial.is_cuda:
            dist.all_reduce(partial, group=self.group)
            return partial
        elements = partial.reshape(-1)
        total = (
            _add_in_order(self._gather_all(elements).view(self.size, -1))
            if elements.nbytes < EXCHANGED_BYTES
            else self._exchange_and_add(elements)
        )
        return total.view(partial.shape)

    def join(self, part: Tensor) -> Tensor:  # [..., n] -> [..., ranks * n]
        """Return the columns of all ranks, side by side, on every rank."""
        parts = self._gather_all(part.reshape(-1)).view(self.size, -1, part.shape[-1])
        return parts.transpose(0, 1).reshape(*part.shape[:-1], -1)

    def minimum(self, count: int, *, device: torch.device) -> int:
        """Return the smallest count of all ranks."""
        counts = torch.tensor([count], device=device)
        dist.all_reduce(counts, op=dist.ReduceOp.MIN, group=self.group)
        return int(counts.item())

    def maximum(self, values: Tensor) -> Tensor:
        """Return the largest of all ranks' values, element by element; `values` is lost."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def gather(self, part: Tensor) -> list[Tensor] | None:
        """Return all ranks' parts, equal in shape, on rank 0; None on other ranks."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(part, parts, group=self.group, group_dst=0)
        return parts

    def _exchange_and_add(self, elements: Tensor) -> Tensor:
        """Return the sum of 1-dimensional tensors, of which each rank adds a share."""
        padded = F.pad(elements, (0, -len(elements) % self.size))
        shares = torch.empty_like(padded)
        dist.all_to_all_single(shares, padded, group=self.group)
        own = _add_in_order(shares.view(self.size, -1))
        return self._gather_all(own)[: len(elements)]

    def _gather_all(self, part: Tensor) -> Tensor:
        """Return all ranks' 1-dimensional tensors, one after the other, on every rank."""
        parts = part.new_empty(self.size * len(part))
        _all_gather(parts, part, group=self.group)
        return parts


@dataclass(frozen=True, slots=True)
class Part:
    """Ranges of one dimension, which is counted from the end."""

    dim: int
    ranges: tuple[Range, ...]

    def shape(self, whole: torch.Size) -> torch.Size:
        sizes = list(whole)
        sizes[self.dim] = sum(stop - first for first, stop in self.ranges)
        return torch.Size(sizes)


class Division:
    """The plan of a model, applied for one rank."""

    def __init__(self, module: Any, shard: Shard, *, prefix: str, head: str) -> None:
        """Prepare the plan of a module.

        `prefix` is the base model's name in the module, empty if it is the module itself; `head`
        is the name of the vocabulary head.
        """
        config = module.config
        check_plan(config, shard.size)
        self.shard, self.heads, self.head, self.vocab = (
            shard,
            HeadCounts.from_config(config),
            head,
            config.vocab_size,
        )
        plan = gathered_plan(config) if shard.gathers else plan_for(config)
        self._styles = [(_regex(prefix, pattern), STYLES[style]) for pattern, style in plan.items()]
        self._check_experts(module, config)

    def part(self, name: str, shape: torch.Size) -> Part | None:
        """Return the part of a parameter that this rank holds; None: all of it."""
        owner, _, leaf = name.rpartition(".")
        if owner == self.head:
            dim = -1 if leaf == "bias" else -2
            return Part(dim, (self._vocabulary(shape[dim]),))
        bare, style = self._style(name), self._style(owner)
        cut = (
            bare.weight
            if bare
            else (style.bias if leaf == "bias" else style.weight)
            if style
            else None
        )
        return None if cut is None else Part(cut.dim, self._ranges(name, cut, shape[cut.dim]))

    def is_zero(self, name: str) -> bool:
        """Return whether the parameter is zero here because rank 0 alone adds it to the sum."""
        owner, _, leaf = name.rpartition(".")
        bare, style = self._style(name), self._style(owner)
        once = bare.once if bare else style is not None and style.sums and leaf == "bias"
        return once and self.shard.rank > 0

    def narrow(self, module: Any) -> None:
        """Make a module compute with this rank's parts, which its parameters already are."""
        self._resize(module)
        for name, child in list(module.named_modules()):
            style = self._style(name)
            if style is not None and style.members is not None:
                ((first, stop),) = self._ranges(name, Cut(0, (style.members,)), len(child))
                _replace(module, name, child[first:stop])
            wrapper = None if style is None else _wrapper(style)
            if wrapper is not None:
                _replace(module, name, wrapper(child, self.shard))
        _replace(
            module, self.head, GatheredHead(module.get_submodule(self.head), self.vocab, self.shard)
        )

    def _style(self, name: str) -> Style | None:
        return next((style for regex, style in self._styles if regex.fullmatch(name)), None)

    def _ranges(self, name: str, cut: Cut, length: int) -> tuple[Range, ...]:
        rank, size = self.shard.rank, self.shard.size
        counts = [
            {HEADS: self.heads.query, KV_HEADS: self.heads.kv, ANY: size}[units]
            for units in cut.parts
        ]
        width, rest = divmod(length, sum(counts))
        if rest:
            raise NoShardingPlan(
                f"{name} has {length} rows or columns, which {size} ranks cannot share evenly"
            )
        ranges, before = [], 0
        for units in counts:
            share = max(1, units // size)
            first = before + rank * units // size
            ranges.append((first * width, (first + share) * width))
            before += units
        return tuple(ranges)

    def _vocabulary(self, rows: int) -> Range:
        share = -(-rows // self.shard.size)
        return min(self.shard.rank * share, rows), min((self.shard.rank + 1) * share, rows)

    def _resize(self, module: Any) -> None:
        """Adjust the sizes that modules use in their forward to this rank's head counts.

        Modules keep their own copies, but some read the config.
        """
        config, local = module.config, self.heads.local(self.shard.size)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads.query
        if not isinstance(getattr(type(config), "head_dim", None), property):
            config.head_dim = head_dim
        for target in (config, *module.modules()):
            for name, value in _local_sizes(local, head_dim).items():
                if isinstance(getattr(target, name, None), int):
                    setattr(target, name, value)
        for part in module.modules():
            if isinstance(part, nn.Linear):
                part.out_features, part.in_features = part.weight.shape
            elif hasattr(part, "nf"):  # Conv1D
                part.nf = part.weight.shape[1]

    def _check_experts(self, module: nn.Module, config: Any) -> None:
        """Raise NoShardingPlan for a layout of experts that the library's plans do not cover.

        These are experts stored transposed, or with gate and up alternating.
        """
        odd = any(
            getattr(part, "is_transposed", False) or not getattr(part, "is_concatenated", True)
            for part in module.modules()
        )
        if odd and config.model_type not in OWN_PLANS:
            raise NoShardingPlan(
                f"the experts of {config.model_type} models are stored in a layout that specserve "
                "cannot divide"
            )


class RowWiseModule(nn.Module):
    """A module whose inputs are divided among the ranks."""

    def __init__(self, inner: nn.Module, shard: Shard) -> None:
        super().__init__()
        self.inner, self.shard = inner, shard

    @property
    def weight(self) -> Any:
        return self.inner.weight

    @property
    def bias(self) -> Any:
        return self.inner.bias


class SummedModule(RowWiseModule):
    """A row-wise module whose output is summed over the ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        partial: Tensor = self.inner(*args, **kwargs)
        return self.shard.sum(partial)


class GatheredModule(RowWiseModule):
    """A row-wise module of which each rank computes a share of the outputs from all inputs."""

    def forward(self, x: Tensor) -> Tensor:
        own: Tensor = self.inner(self.shard.join(x))
        return self.shard.join(own)


class JoinedModule(RowWiseModule):
    """A module over all ranks' inputs, of whose outputs each rank keeps its own part."""

    def forward(self, x: Tensor) -> Tensor:
        whole: Tensor = self.inner(self.shard.join(x))
        return whole.chunk(self.shard.size, dim=-1)[self.shard.rank]


class GatheredHead(nn.Module):
    """The vocabulary head, of which each rank has a share.

    Rank 0 returns all logits, the others zeros of the same shape. While it is `keeping_shares`,
    each rank returns its own share, and nothing is exchanged.
    """

    def __init__(self, inner: nn.Module, vocab: int, shard: Shard) -> None:
        super().__init__()
        self.inner, self.vocab, self.shard = inner, vocab, shard
        self.share = -(-vocab // shard.size)  # tokens of each rank; the last ones may have fewer
        self._keeps_share = False

    def forward(self, hidden: Tensor) -> Tensor:  # [..., hidden]
        part: Tensor = self.inner(hidden)
        return part if self._keeps_share else self.gather(part)

    def gather(self, part: Tensor) -> Tensor:  # [..., own share] -> [..., vocab]
        parts = self.shard.gather(self.padded(part))
        if parts is None:
            return part.new_zeros(1).expand(*part.shape[:-1], self.vocab)
        return torch.cat(parts, dim=-1)[..., : self.vocab]

    def padded(self, part: Tensor) -> Tensor:  # [..., own share] -> [..., share]
        """Return a rank's logits padded to the width of all shares by tokens that cannot be."""
        missing = self.share - part.shape[-1]
        return F.pad(part, (0, missing), value=-torch.inf) if missing else part

    @contextmanager
    def keeping_shares(self) -> Iterator[None]:
        self._keeps_share = True
        try:
            yield
        finally:
            self._keeps_share = False


def _wrapper(style: Style) -> type[RowWiseModule] | None:
    """Return what computes a module of this style on several ranks; None: the module itself."""
    if style.sums:
        return SummedModule
    if style.gathers:
        return GatheredModule
    return JoinedModule if style.joins else None


def _add_in_order(parts: Tensor) -> Tensor:  # [ranks, n] -> [n]
    """Return the sum of the parts from first to last, computed in fp32 and rounded once."""
    first, *others = parts.unbind(0)
    total = first.float()
    for part in others:
        total += part
    return total.to(parts.dtype)


def _local_sizes(local: HeadCounts, head_dim: int) -> dict[str, int]:
    return {
        "num_heads": local.query,
        "n_heads": local.query,  # of T5
        "num_attention_heads": local.query,
        "num_key_value_heads": local.kv,
        "num_kv_heads": local.kv,  # of Falcon
        "num_key_value_groups": local.query // local.kv,
        "split_size": local.query * head_dim,  # of GPT-2
    }


def _regex(prefix: str, pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(f"{prefix}.{pattern}".removeprefix(".")).replace(r"\*", r"\d+"))


def _replace(module: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent), leaf, new)
