"""The parser of every command line here: errors are one line, and examples are not wrapped."""

from __future__ import annotations

import argparse
from typing import NoReturn


class BadUsage(Exception):
    """Invalid arguments."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line without the usage, and that does not wrap examples."""

    def __init__(self, **options: object) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=formatter, **options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        raise BadUsage(f"{message} (see {self.prog} --help)")
