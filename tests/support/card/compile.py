"""Compile the Triton kernels for cards that are not here: `python -m tests.support.card.compile`.

Triton brings NVIDIA's assembler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specserve.models.gpu.triton_kernels import (
    gate_kernel,
    rms_norm_kernel,
    rotate_and_write_kernel,
)
from specserve.sampling.triton_draw import draw_kernel

ARCHITECTURES = (80, 90, 100)
WARP = 32


@dataclass(frozen=True, slots=True)
class KernelSignature:
    """A kernel with the types of its arguments, and sizes of a real model."""

    kernel: Any
    types: Mapping[str, str]
    sizes: Mapping[str, int]


SIGNATURES = (
    KernelSignature(
        draw_kernel,
        {
            "weights": "*fp32",
            "rows": "*i64",
            "keys": "*i32",
            "scores": "*fp32",
            "tokens": "*i64",
            "stride": "i32",
            "first_id": "i32",
        },
        {"vocab": 128_256, "block": 1024},
    ),
    KernelSignature(
        rotate_and_write_kernel,
        {
            "qk": "*bf16",
            "v": "*bf16",
            "table": "*bf16",
            "positions": "*i64",
            "slots": "*i64",
            "q_out": "*bf16",
            "keys": "*bf16",
            "values": "*bf16",
            "qk_stride": "i32",
            "v_stride": "i32",
        },
        {"heads": 16, "kv_heads": 2, "dim": 128, "block": 128},
    ),
    KernelSignature(gate_kernel, {"both": "*bf16", "out": "*bf16"}, {"width": 7168, "block": 1024}),
    KernelSignature(
        rms_norm_kernel,
        {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "stride": "i32", "eps": "fp32"},
        {"width": 4096, "block": 4096},
    ),
)


def main() -> None:
    for signature in SIGNATURES:
        types = {**signature.types, **dict.fromkeys(signature.sizes, "constexpr")}
        for architecture in ARCHITECTURES:
            source = ASTSource(
                fn=signature.kernel, signature=types, constexprs=dict(signature.sizes)
            )
            compiled = triton.compile(source, target=GPUTarget("cuda", architecture, WARP))
            size = len(compiled.asm["cubin"])
            print(f"{signature.kernel.fn.__name__}, sm_{architecture}: {size} bytes")


if __name__ == "__main__":
    main()
