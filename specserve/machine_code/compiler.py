"""Compile functions for the processor at hand."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import __version__ as llvmlite_version
from llvmlite import binding, ir

from specserve.machine_code.object_cache import cached_code
from specserve.machine_code.teams import C_KINDS
from specserve.machine_code.vectors import INT

Function = Callable[..., None]


def new_module(name: str) -> ir.Module:
    module = ir.Module(name)
    module.triple = binding.get_default_triple()
    return module


def function_of(engine: Any, name: str, kinds: Sequence[Any]) -> Function:
    """Return a compiled function that takes arguments of these kinds and the size of a team."""
    kind = ctypes.CFUNCTYPE(None, *(C_KINDS[one] for one in kinds), C_KINDS[INT])
    function = kind(engine.get_function_address(name))
    function.engine = engine  # type: ignore[attr-defined]  # which owns the code
    return function


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
