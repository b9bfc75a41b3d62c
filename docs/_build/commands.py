"""The command line as a page, from its own parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from specserve.cli.arguments import parser as command_line
from docs._build.table import code, table

INTRODUCTION = """# Commands

Made from the program's own parser when these pages are built; `specserve COMMAND --help` says the same.

Exit codes: 0 done, 2 bad usage or configuration (one line says what, on the error output), 1 failure.
"""


def page() -> str:
    return "\n".join([INTRODUCTION, *(_command(name, told, parser) for name, told, parser in commands())])


def commands() -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Each command's name, what it is for, and its parser."""
    (action,) = [action for action in command_line()._actions if isinstance(action, argparse._SubParsersAction)]
    told = {choice.dest: choice.help or "" for choice in action._choices_actions}
    for name, parser in action.choices.items():
        yield name, told.get(name, ""), parser


def _command(name: str, told: str, parser: argparse.ArgumentParser) -> str:
    rows = [(_spelling(action), _told(action)) for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    return f"## {code('specserve ' + name)}\n\n{told[:1].upper()}{told[1:]}.\n\n{table(('argument', 'meaning'), rows)}"


def _spelling(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings)
    value = "" if action.nargs == 0 else _value(action)
    return code(f"{names} {value}".strip()) + (" (required)" if action.required and action.option_strings else "")


def _value(action: argparse.Action) -> str:
    name = action.metavar or action.dest.upper()
    return f"{name if isinstance(name, str) else ' '.join(name)}{' ...' if action.nargs in ('+', '*') else ''}"


def _told(action: argparse.Action) -> str:
    """The help, the choices where the spelling does not show them, and a default that the help does not mention."""
    parts = [(action.help or "").replace("%%", "%")]
    if action.choices:
        parts.append("one of " + ", ".join(map(str, action.choices)))
    if action.default not in (None, False, [], argparse.SUPPRESS) and "default" not in parts[0]:
        parts.append(f"{action.default} by default")
    return "; ".join(part for part in parts if part)
