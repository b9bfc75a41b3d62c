"""Compiled code that is kept on disk: taken from there, and compiled again where it is broken."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llvmlite")

from llvmlite import binding, ir

from specserve.machine_code.compiler import compile_module


def module_of(number: int) -> ir.Module:
    """Return a module with a function that returns a number."""
    module = ir.Module("numbers")
    kind = ir.IntType(32)
    block = ir.Function(module, ir.FunctionType(kind, []), "number").append_basic_block()
    ir.IRBuilder(block).ret(ir.Constant(kind, number))
    return module


def result_of(engine: Any) -> int:
    result: int = ctypes.CFUNCTYPE(ctypes.c_int32)(engine.get_function_address("number"))()
    return result


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keep code below a folder of the test; return the list of what is parsed to be compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parse: Callable[[str], Any] = binding.parse_assembly
    parsed: list[str] = []

    def note(text: str) -> Any:
        parsed.extend([text] * bool(text))
        return parse(text)

    monkeypatch.setattr(binding, "parse_assembly", note)
    return parsed


def test_code_is_compiled_once_for_all_processes(compilations: list[str], tmp_path: Path) -> None:
    for number in (7, 7, 8):
        assert result_of(compile_module(module_of(number))) == number
    assert len(compilations) == 2
    assert len(list((tmp_path / "specserve").glob("code-*/*"))) == 2


@pytest.mark.parametrize("change", [lambda code: code[:-1], lambda code: b"", lambda code: b"x"])
def test_what_is_broken_on_disk_is_compiled_again(
    change: Callable[[bytes], bytes], compilations: list[str], tmp_path: Path
) -> None:
    compile_module(module_of(7))
    (stored,) = (tmp_path / "specserve").glob("code-*/*")
    stored.write_bytes(change(stored.read_bytes()))
    assert result_of(compile_module(module_of(7))) == 7
    assert len(compilations) == 2
    stored.unlink()
    assert result_of(compile_module(module_of(7))) == 7
    assert len(compilations) == 3


def test_without_a_folder_to_write_it_is_compiled_each_time(
    compilations: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    for _ in range(2):
        assert result_of(compile_module(module_of(7))) == 7
    assert len(compilations) == 2
