"""Compile all functions for this processor, which has AVX-512 with bf16."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import __version__ as llvmlite_version
from llvmlite import binding, ir

from specserve.models.cpu.compiled import attention, layers, norms, products
from specserve.models.cpu.compiled.object_cache import cached_code
from specserve.models.cpu.compiled.teams import C_KINDS, Team
from specserve.models.cpu.compiled.tiles import Tiles
from specserve.models.cpu.compiled.vectors import INT, POINTER

Function = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Functions:
    """Compiled functions. They take addresses and numbers, and at last the size of the team."""

    product: Function
    unrounded_product: Function
    gated_product: Function
    attention: Function
    rms_norm: Function
    layers: Function
    engine: Any  # which owns the code


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
        engine=engine,
    )


def function_of(engine: Any, name: str, kinds: Sequence[Any]) -> Function:
    """Return a compiled function that takes arguments of these kinds and the size of a team."""
    kind = ctypes.CFUNCTYPE(None, *(C_KINDS[one] for one in kinds), C_KINDS[INT])
    return kind(engine.get_function_address(name))


def compile_module(module: ir.Module) -> Any:
    """Return the engine that owns a module's compiled functions."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    binding.initialize_native_asmparser()
    cpu, features = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=features, codemodel="jitdefault"
    )
    text = str(module)

    def compile_code() -> bytes:
        parsed = binding.parse_assembly(text)
        parsed.verify()
        passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(2))
        passes.getModulePassManager().run(parsed, passes)
        code: bytes = machine.emit_object(parsed)
        return code

    code = cached_code("\0".join((llvmlite_version, cpu, features, text)), compile_code)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def _module() -> ir.Module:
    module = ir.Module("specserve")
    module.triple = binding.get_default_triple()
    tiles, team = Tiles.of_bf16(module), Team(module)
    layers.add_layers(
        module,
        team,
        products=products.add_products(module, team, products.AllTiles(module, tiles)),
        attention=attention.AttentionCode(module, tiles, team),
        norms=norms.Norms(module, team),
    )
    return module
