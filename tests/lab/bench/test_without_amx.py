"""The option that compiles no code for AMX."""

from __future__ import annotations

import argparse

import pytest

from lab.bench import without_amx

pytest.importorskip("llvmlite")
from llvmlite import binding


@pytest.mark.parametrize(("given", "has_amx"), [([], True), (["--without-amx"], False)])
def test_compiled_code_sees_no_amx_where_the_option_is_given(
    monkeypatch: pytest.MonkeyPatch, given: list[str], *, has_amx: bool
) -> None:
    flags = ("amx-tile", "amx-bf16", "avx512f")
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: dict.fromkeys(flags, True))
    parser = argparse.ArgumentParser()
    without_amx.add_option(parser)
    without_amx.obey(parser.parse_args(given))
    found = dict(zip(flags, (has_amx, has_amx, True), strict=True))
    assert binding.get_host_cpu_features() == found
