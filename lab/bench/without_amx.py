"""Compiled code without AMX, for commands that show what AMX changes: `--without-amx`."""

from __future__ import annotations

import argparse
from typing import Any


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--without-amx", action="store_true", help="compile no code that uses AMX")


def obey(options: argparse.Namespace) -> None:
    """Compile as for a processor of this kind without AMX, where the option is given."""
    if not options.without_amx:
        return
    from llvmlite import binding

    found = binding.get_host_cpu_features

    def features() -> Any:
        own = found()
        own.update({name: False for name in own if name.startswith("amx")})
        return own

    binding.get_host_cpu_features = features
