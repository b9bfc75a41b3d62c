"""Kernels of linear layers on CPUs: how a weight is packed, and what multiplies it.

All are row-invariant: a row's result has the same bits whatever shares its pass.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.errors import ConfigError
from specserve.models.coded_weight import ZERO_CODE, CodedWeight, join_coded
from specserve.models.shape_buckets import bucket_size
from specserve.processor import processor_flags

if TYPE_CHECKING:
    from specserve.machine_code.compiler import Function
    from specserve.models.cpu.compiled.functions import Functions

log = logging.getLogger(__name__)

LONG_INNER = 1024
"""Inner size from about which oneDNN sums a single row in another order."""
CACHE_LINE = 64
COMPILING_FAILS = (ImportError, OSError, RuntimeError, ValueError, AttributeError)
"""Errors of compiling, and of trying what was compiled."""
MAX_SERIAL = 1 << 18
"""Multiplications up to which one thread is done before a team of them has begun."""


MAX_SPAN = 4096
"""Inputs of a panel's part with small integers, if halves are even: 64 kB and more of them."""
MIN_HALVES_SPAN = 16
"""Inputs of a span whose scales may be in fp16.

With fewer, as many bytes could be integers of 8 bits and scales in fp16, or 4 bits and fp32.
"""


class LinearKernel(Protocol):
    """A way to compute x W^T + b."""

    name: str

    def __hash__(self) -> int: ...

    def pack(self, weight: Tensor) -> Tensor:
        """Return a weight [out, in] in the order in which `product` reads it."""
        ...

    def product(
        self, x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        """Return x W^T + b of rows [n, in], added to residual [n, out] if there is one."""
        ...

    def unrounded_product(
        self, x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None
    ) -> Tensor:
        """Return x W^T + b of rows [n, in] in float32."""
        ...

    def interleave(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return two weights [out, in] as one, for `gated_product`."""
        ...

    def gated_product(self, x: Tensor, packed: Tensor, outputs: int) -> Tensor:
        """Return silu(x G^T) * (x U^T) of rows [n, in]."""
        ...


class OneDnnKernel:
    """The products of oneDNN, which come with torch: float32's, and bf16's where it has such."""

    name = "onednn"

    def __init__(self) -> None:
        self._product = torch.ops.mkldnn._linear_pointwise

    def pack(self, weight: Tensor) -> Tensor:
        weight = weight.widen() if isinstance(weight, CodedWeight) else weight
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
        return packed

    def product(
        self, x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        rows = len(x)
        padding = 1 if rows == 1 and x.shape[1] >= LONG_INNER else bucket_size(rows) - rows
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
            residual = None if residual is None else F.pad(residual, (0, 0, 0, padding))
        out: Tensor = (
            self._product.default(x, packed, bias, "none", [], "")
            if residual is None
            else self._product.binary(x, residual, packed, bias, "add")
        )
        return out[:rows] if padding else out

    def unrounded_product(
        self, x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None
    ) -> Tensor:
        """Return x W^T + b in float32: in bf16, what rounding took is added in a second product."""
        out = self.product(x, packed, outputs, bias, None)
        if out.dtype == torch.float32:
            return out
        return out.float() + self.product(x, packed, outputs, bias, -out)

    def interleave(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.cat([gate, up])

    def gated_product(self, x: Tensor, packed: Tensor, outputs: int) -> Tensor:
        gate, up = self.product(x, packed, 2 * outputs, None, None).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class WidenedOneDnnKernel(OneDnnKernel):
    """The products of oneDNN on processors without bf16: weights are kept in float32.

    They take twice the memory. oneDNN packs no bf16 weights there, and torch's own loops over them
    take 4 to 8 times as long at 8 to 32 rows (1,000 x 4,096, AVX2, one thread).
    """

    name = "onednn-float32"

    def pack(self, weight: Tensor) -> Tensor:
        return super().pack(weight.float())

    def product(
        self, x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        bias = None if bias is None else bias.float()
        residual = None if residual is None else residual.float()
        return super().product(x.float(), packed, outputs, bias, residual).bfloat16()

    def unrounded_product(
        self, x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None
    ) -> Tensor:
        bias = None if bias is None else bias.float()
        return super().product(x.float(), packed, outputs, bias, None)


class CompiledKernel:
    """The products of `compiled`, for processors that have AVX-512 with bf16.

    Up to some thirty rows they take 0.7 to 0.9 times as long as oneDNN's.
    """

    name = "compiled"

    def __init__(self, functions: Functions) -> None:
        self.functions = functions

    def pack(self, weight: Tensor) -> Tensor:
        from specserve.models.cpu.compiled.tiles import PANEL

        if isinstance(weight, CodedWeight):
            return pack_coded(weight)
        outputs, inputs = weight.shape
        weight = F.pad(weight, (0, inputs % 2, 0, -outputs % PANEL))
        return weight.view(-1, PANEL, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()

    def product(
        self, x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        out = x.new_empty(len(x), outputs)
        return self._run(self.functions.product, x, packed, out, bias, residual)

    def unrounded_product(
        self, x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None
    ) -> Tensor:
        out = x.new_empty(len(x), outputs, dtype=torch.float32)
        return self._run(self.functions.unrounded_product, x, packed, out, bias)

    def interleave(self, gate: Tensor, up: Tensor) -> Tensor:
        coded = join_coded((gate, up), lambda parts: _interleave(*parts))
        return _interleave(gate, up) if coded is None else coded

    def gated_product(self, x: Tensor, packed: Tensor, outputs: int) -> Tensor:
        out = x.new_empty(len(x), outputs)
        return self._run(self.functions.gated_product, x, packed, out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight."""
        x = x.contiguous()
        out, width = torch.empty_like(x), x.shape[-1]
        rows = x.numel() // width
        threads = 1 if x.numel() <= MAX_SERIAL else torch.get_num_threads()
        self.functions.rms_norm(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, 2 * width, eps, threads
        )
        return out

    def _run(
        self,
        function: Function,
        x: Tensor,
        packed: Tensor,
        out: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        from specserve.models.cpu.compiled.products import MAX_ROWS

        rows, inputs = x.shape
        width = inputs + inputs % 2
        stride = row_stride(width) if rows > 1 else 2 * width
        x = F.pad(x, (0, stride // 2 - inputs)) if stride != 2 * inputs else x.contiguous()
        outputs, out_stride = out.shape[1], out.stride(0) * out.element_size()
        kind, span = weight_layout(packed, inputs)
        pairs, more = width // 2, None if residual is None else residual.contiguous()
        threads = 1 if rows * packed.numel() <= MAX_SERIAL else torch.get_num_threads()
        for start in range(0, rows, MAX_ROWS):
            function(
                x.data_ptr() + start * stride,
                packed.data_ptr(),
                out.data_ptr() + start * out_stride,
                0 if more is None else more.data_ptr() + start * out_stride,
                0 if bias is None else bias.data_ptr(),
                min(MAX_ROWS, rows - start),
                pairs,
                outputs,
                kind,
                span,
                stride,
                out_stride,
                threads,
            )
        return out


def _interleave(gate: Tensor, up: Tensor) -> Tensor:
    from specserve.machine_code.vectors import LANES

    groups = [
        F.pad(weight, (0, 0, 0, -len(weight) % LANES)).view(-1, LANES, weight.shape[1])
        for weight in (gate, up)
    ]
    return torch.cat(groups, dim=1).flatten(0, 1)


def pack_coded(weight: CodedWeight) -> Tensor:
    """Return small integers as the compiled tiles read them, [panels, spans, bytes].

    A span has the scales of its 32 outputs, then their minima, if there are any, and its integers.
    With minima the bytes are int8, otherwise uint8. Scales and minima are in fp16 if that changes
    none of them, as in files of llama.cpp.
    """
    from specserve.models.cpu.compiled.tiles import PANEL

    outputs, inputs = weight.shape
    missing, groups = -outputs % PANEL, weight.scales.shape[1]
    spans = groups
    while inputs // spans > MAX_SPAN and inputs // spans % 4 == 0:
        spans *= 2
    of_groups = [weight.scales] if weight.minima is None else [weight.scales, weight.minima]
    if inputs // spans >= MIN_HALVES_SPAN and all(map(_fits_halves, of_groups)):
        of_groups = [numbers.half() for numbers in of_groups]
    of_spans = [
        F.pad(numbers.repeat_interleave(spans // groups, dim=1), (0, 0, 0, missing))
        .view(-1, PANEL, spans)
        .transpose(1, 2)
        for numbers in of_groups
    ]
    integers = F.pad(weight.integers, (0, 0, 0, missing))
    shape = (-1, PANEL, spans, inputs // spans // 2, 2)
    codes = integers.view(shape).permute(0, 2, 3, 1, 4)  # [panels, spans, pairs, PANEL, 2]
    if weight.bits == 4:
        zero = ZERO_CODE if weight.minima is None else 0
        first, second = (codes.flatten(3) + zero).view(torch.uint8).chunk(2, dim=-1)
        codes = first | second << 4
    parts = [*(numbers.contiguous() for numbers in of_spans), codes.flatten(2)]
    kind = torch.uint8 if weight.minima is None else torch.int8
    return torch.cat([part.view(kind) for part in parts], dim=-1)


def _fits_halves(numbers: Tensor) -> bool:
    return torch.equal(numbers.half().float(), numbers)


def weight_layout(packed: Tensor, inputs: int) -> tuple[int, int]:
    """Return the kind of a packed weight, and the pairs of inputs that share scales.

    It is 16 for bf16 and otherwise one of the compiled tiles' KINDS.
    """
    if packed.dtype not in (torch.uint8, torch.int8):
        return 16, 0
    _, spans, num_bytes = packed.shape
    width = inputs // spans
    return _coded_kind(num_bytes, width, packed.dtype == torch.int8), width // 2


@cache
def _coded_kind(num_bytes: int, width: int, has_minima: bool) -> int:
    """Return the kind whose spans of that many inputs have these bytes."""
    from specserve.models.cpu.compiled.coded_tiles import HALVES, KINDS, MINIMA, header_bytes
    from specserve.models.cpu.compiled.tiles import PANEL

    return next(
        kind
        for kind in KINDS
        if bool(kind & MINIMA) == has_minima
        and (width >= MIN_HALVES_SPAN or not kind & HALVES)
        and header_bytes(kind) + PANEL * width * (kind % MINIMA) // 8 == num_bytes
    )


def row_stride(width: int) -> int:
    """Return the bytes from one row of a product's input to the next.

    Rows of a tile that lie a multiple of 1 kB apart would push one another out of the cache.
    """
    stride = 2 * width
    return stride + CACHE_LINE if stride % 1024 == 0 else stride


def linear_kernel(name: str = "auto", dtype: torch.dtype = torch.bfloat16) -> LinearKernel:
    """Return a kernel by its name. Raises ConfigError for one that does not run here.

    In float32 there is one alone. `auto` depends on the processor alone, not on how fast each
    happens to be: an engine that takes over another's requests has to compute the same bits.
    """
    if dtype == torch.float32:
        return _onednn_float32()
    if name == "onednn" or (name == "auto" and missing_for_compiled() is not None):
        return _onednn()
    missing = missing_for_compiled()
    if missing is not None:
        raise ConfigError(f"weights.kernel: compiled needs {missing}; use auto or onednn.")
    return _compiled() or _onednn()


@cache
def missing_for_compiled() -> str | None:
    """Return what the compiled kernel lacks here; None if it is the one to use."""
    if "avx512_bf16" not in processor_flags() or not multiplies_bf16():
        return "a processor that has AVX-512 with bf16"
    return None if find_spec("llvmlite") else "llvmlite (pip install 'specserve[cpu]')"


def compiles_for_amx() -> bool:
    """Return whether the compiled kernel is there, and uses AMX."""
    if missing_for_compiled() is not None:
        return False
    from specserve.models.cpu.compiled.amx_tiles import may_use_amx

    return may_use_amx()


def compile_ahead() -> None:
    """Compile, for processes that are forked from this one; one that cannot do so says it there."""
    if missing_for_compiled() is None:
        with suppress(*COMPILING_FAILS):
            from specserve.models.cpu.compiled.functions import compile_functions

            compile_functions()


def multiplies_bf16() -> bool:
    """Return whether oneDNN has bf16 products here; ONEDNN_MAX_CPU_ISA=AVX2 is as if it had not."""
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return supported


@cache
def _onednn() -> OneDnnKernel:
    return OneDnnKernel() if multiplies_bf16() else WidenedOneDnnKernel()


@cache
def _onednn_float32() -> OneDnnKernel:
    return OneDnnKernel()


@cache
def _compiled() -> CompiledKernel | None:
    """Compile, and try on a small product; None if anything is wrong."""
    try:
        from specserve.models.cpu.compiled.functions import compile_functions
        from specserve.models.cpu.compiled_attention import check_attention

        kernel = CompiledKernel(compile_functions())
        _check(kernel)
        check_attention(kernel.functions.attention)
    except COMPILING_FAILS as error:
        log.warning("linear layers run in oneDNN, the compiled kernel fails: %s", error)
        return None
    return kernel


def _check(kernel: LinearKernel) -> None:
    """Raise ValueError for wrong numbers, or for rows that depend on one another."""
    generator = torch.Generator().manual_seed(0)
    x, weight, residual = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((31, 96), (80, 96), (31, 80))
    )
    coded = weight.mul(20).round().clamp(-128, 127).to(torch.int8)
    minima = weight[:, :3].float()
    coded_weights = [
        CodedWeight.from_integers(integers, torch.full((80, 3), scale), added)
        for scale in (0.05, 0.0625)  # the second one is kept in fp16
        for integers, added in (
            (coded, None),
            (coded // 16, None),
            (coded, minima),
            (coded // 16 + ZERO_CODE, minima),
        )
    ]
    for own in (weight, *coded_weights):
        _check_product(kernel, x, own, weight[:, 0].contiguous(), residual)


def _check_product(
    kernel: LinearKernel, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor
) -> None:
    packed = kernel.pack(weight)
    out = kernel.product(x, packed, 80, bias, residual)
    exact = weight.double()
    if isinstance(weight, CodedWeight):
        exact = weight.integers.double() * weight.scales[:, :1].double()  # all are equal
        if weight.minima is not None:
            exact += weight.minima.double().repeat_interleave(32, dim=1)
    expected = x.double() @ exact.T + bias.double() + residual.double()
    if (out.double() - expected).abs().max() > 4e-3 * expected.abs().max():
        raise ValueError("its numbers are wrong")
    unrounded = kernel.unrounded_product(x, packed, 80, bias).double() + residual.double()
    if (unrounded - expected).abs().max() > 1e-4 * expected.abs().max():
        raise ValueError("its numbers are wrong in float32")
    alone = kernel.product(x[:1], packed, 80, bias, residual[:1])
    if not torch.equal(alone, out[:1]):
        raise ValueError("its rows depend on one another")
