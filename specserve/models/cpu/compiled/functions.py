"""Compile all functions for this processor, which has AVX-512 with bf16."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from llvmlite import ir

from specserve.machine_code.compiler import Function, compile_module, function_of, new_module
from specserve.machine_code.teams import Team
from specserve.machine_code.vectors import POINTER
from specserve.models.cpu.compiled import attention, layers, norms, products
from specserve.models.cpu.compiled.amx_tiles import AmxTiles, may_use_amx
from specserve.models.cpu.compiled.tiles import Tiles
from specserve.models.cpu.compiled.weight_kinds import AllTiles


@dataclass(frozen=True, slots=True)
class Functions:
    """Compiled functions. They take addresses and numbers, and at last the size of the team."""

    product: Function
    unrounded_product: Function
    gated_product: Function
    attention: Function
    rms_norm: Function
    layers: Function


@cache
def compile_functions() -> Functions:
    """Compile once a process; one that is forked later has the code."""
    engine = compile_module(_module())
    of_product = [products.PRODUCT.kind_of(name) for name in products.ARGUMENTS]
    of_attention = [attention.ATTENTION.kind_of(name) for name in attention.ARGUMENTS]
    of_norm = [norms.NORM.kind_of(name) for name in norms.ARGUMENTS]
    return Functions(
        product=function_of(engine, "product", of_product),
        unrounded_product=function_of(engine, "unrounded_product", of_product),
        gated_product=function_of(engine, "gated_product", of_product),
        attention=function_of(engine, "attention", of_attention),
        rms_norm=function_of(engine, "rms_norm", of_norm),
        layers=function_of(engine, "layers", [POINTER]),
    )


def _module() -> ir.Module:
    module = new_module("specserve")
    tiles, team = Tiles.of_bf16(module), Team(module)
    amx = AmxTiles(module) if may_use_amx() else None
    layers.add_layers(
        module,
        team,
        products=products.add_products(module, team, AllTiles(module, tiles, amx)),
        attention=attention.AttentionCode(module, tiles, amx, team),
        norms=norms.Norms(module, team),
    )
    return module
