"""Reference page of the command line, made from its parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from docs._build.table import code, table
from specserve.cli.arguments import build_parser as command_line
from specserve.cli.parser import help_of

INTRODUCTION = """# Commands

Made from the program's parser when the site is built; `specserve COMMAND --help` prints the same.

Exit codes: 0 done, 2 bad usage or configuration (one line on stderr says what), 1 failure.
"""


def page() -> str:
    return "\n".join(
        [INTRODUCTION, *(_command(name, purpose, parser) for name, purpose, parser in commands())]
    )


def commands() -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Yield each command's name, its purpose and its parser."""
    (action,) = [
        action
        for action in command_line()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    purposes = {choice.dest: choice.help or "" for choice in action._choices_actions}
    for name, parser in action.choices.items():
        yield name, purposes.get(name, ""), parser


def _command(name: str, purpose: str, parser: argparse.ArgumentParser) -> str:
    rows = [
        (_spelling(action), _meaning(action))
        for action in parser._actions
        if not isinstance(action, argparse._HelpAction)
    ]
    heading = f"## {code('specserve ' + name)}"
    options = table(("argument", "meaning"), rows)
    return f"{heading}\n\n{purpose[:1].upper()}{purpose[1:]}.\n\n{options}"


def _spelling(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings)
    value = "" if action.nargs == 0 else _value(action)
    return code(f"{names} {value}".strip()) + (
        " (required)" if action.required and action.option_strings else ""
    )


def _value(action: argparse.Action) -> str:
    name = action.metavar or action.dest.upper()
    repeated = " ..." if action.nargs in ("+", "*") else ""
    return f"{name if isinstance(name, str) else ' '.join(name)}{repeated}"


def _meaning(action: argparse.Action) -> str:
    """Return the help, and the choices and the default that the help does not mention."""
    parts = [help_of(action) % {"default": action.default}]
    if action.choices:
        parts.insert(0, "one of " + ", ".join(map(str, action.choices)))
    return "; ".join(part for part in parts if part)
