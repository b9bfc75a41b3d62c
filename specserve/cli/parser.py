"""The parser of every command line here: one-line errors, defaults, and examples as written."""

from __future__ import annotations

import argparse
from typing import NoReturn


class BadUsage(Exception):
    """Invalid arguments."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A formatter that says each default which the help does not mention."""

    def _get_help_string(self, action: argparse.Action) -> str:
        return help_of(action)


def help_of(action: argparse.Action) -> str:
    """Return an argument's help with its default, if it has one."""
    help = action.help or ""
    no_default = action.default in (None, False, [], argparse.SUPPRESS)
    return help if no_default or "default" in help else f"{help}; %(default)s by default"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line without the usage, and that does not wrap examples."""

    def __init__(self, **options: object) -> None:
        super().__init__(formatter_class=HelpFormatter, **options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        raise BadUsage(f"{message} (see {self.prog} --help)")
