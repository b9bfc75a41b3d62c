"""Tensor parallelism from outside: which part of each parameter a rank holds, and behind which modules the ranks add up.

Plain tensors, one all-reduce behind each row-wise layer. Knows no files, and of architectures no more than their plans.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

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
    Heads,
    Style,
    check_plan,
    plan_for,
)


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's place among those that share a model. The group None is the default group."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        dist.all_reduce(partial, group=self.group)
        return partial

    def least(self, count: int, *, device: torch.device) -> int:
        """The smallest of what the ranks have."""
        counts = torch.tensor([count], device=device)
        dist.all_reduce(counts, op=dist.ReduceOp.MIN, group=self.group)
        return int(counts.item())

    def gather(self, part: Tensor) -> list[Tensor] | None:
        """All ranks' parts, equal in shape, on rank 0; None elsewhere."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(part, parts, group=self.group, group_dst=0)
        return parts


@dataclass(frozen=True, slots=True)
class Part:
    """Ranges of one dimension, counted from the end."""

    dim: int
    ranges: tuple[Range, ...]

    def shape(self, whole: torch.Size) -> torch.Size:
        sizes = list(whole)
        sizes[self.dim] = sum(stop - first for first, stop in self.ranges)
        return torch.Size(sizes)


class Division:
    """A model's plan, applied for one rank."""

    def __init__(self, module: Any, shard: Shard, *, prefix: str, head: str) -> None:
        """`prefix` is the base model's name in the module, empty if it is the module itself; `head` is that of the vocabulary head."""
        config = module.config
        check_plan(config, shard.size)
        self.shard, self.heads, self.head, self.vocab = (
            shard,
            Heads.of(config),
            head,
            config.vocab_size,
        )
        self._styles = [
            (_regex(prefix, pattern), STYLES[style]) for pattern, style in plan_for(config).items()
        ]
        self._check_experts(module, config)

    def part(self, name: str, shape: torch.Size) -> Part | None:
        """What this rank holds of a parameter; None: all of it."""
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
        """Whether rank 0 alone holds this parameter, so that the ranks' sum counts it once."""
        owner, _, leaf = name.rpartition(".")
        bare, style = self._style(name), self._style(owner)
        once = bare.once if bare else style is not None and style.sums and leaf == "bias"
        return once and self.shard.rank > 0

    def narrow(self, module: Any) -> None:
        """Make a module, whose parameters are this rank's parts already, compute with them."""
        self._resize(module)
        for name, child in list(module.named_modules()):
            style = self._style(name)
            if style is not None and style.sums:
                _replace(module, name, Summed(child, self.shard))
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
        """What modules have derived from the head counts and use in their forward; some ask the config itself."""
        config, local = module.config, self.heads.local(self.shard.size)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads.query
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
        """The library's plans say nothing of experts that are stored transposed or with gate and up alternating."""
        odd = any(
            getattr(part, "is_transposed", False) or not getattr(part, "is_concatenated", True)
            for part in module.modules()
        )
        if odd and config.model_type not in OWN_PLANS:
            raise NoShardingPlan(
                f"the experts of {config.model_type} models are stored in a layout that specserve cannot divide"
            )


class Summed(nn.Module):
    """A module whose output is a summand; the sum over the ranks is what the unsharded module gives."""

    def __init__(self, inner: nn.Module, shard: Shard) -> None:
        super().__init__()
        self.inner, self.shard = inner, shard

    @property
    def weight(self) -> Any:
        return self.inner.weight

    @property
    def bias(self) -> Any:
        return self.inner.bias

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        partial: Tensor = self.inner(*args, **kwargs)
        return self.shard.sum(partial)


class GatheredHead(nn.Module):
    """Each rank's share of the vocabulary; rank 0 gives all logits, the others zeros of the same shape."""

    def __init__(self, inner: nn.Module, vocab: int, shard: Shard) -> None:
        super().__init__()
        self.inner, self.vocab, self.shard = inner, vocab, shard

    def forward(self, hidden: Tensor) -> Tensor:  # [..., hidden]
        part: Tensor = self.inner(hidden)
        share = -(-self.vocab // self.shard.size)
        parts = self.shard.gather(
            F.pad(part, (0, share - part.shape[-1]))
        )  # the last rank's share may be smaller
        if parts is None:
            return part.new_zeros(1).expand(*part.shape[:-1], self.vocab)
        return torch.cat(parts, dim=-1)[..., : self.vocab]


def _local_sizes(local: Heads, head_dim: int) -> dict[str, int]:
    return {
        "num_heads": local.query,
        "n_heads": local.query,  # of T5
        "num_attention_heads": local.query,
        "num_key_value_heads": local.kv,
        "num_key_value_groups": local.query // local.kv,
        "split_size": local.query * head_dim,  # of GPT-2
    }


def _regex(prefix: str, pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(f"{prefix}.{pattern}".removeprefix(".")).replace(r"\*", r"\d+"))


def _replace(module: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent), leaf, new)
