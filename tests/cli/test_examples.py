"""Output of --help: every command has examples, and every example is a valid command line."""

from __future__ import annotations

import shlex

import pytest

from specserve.cli.arguments import build_parser
from specserve.cli.examples import EXAMPLES
from specserve.cli.main import COMMANDS, main

LINES = [
    (command, line) for command, text in EXAMPLES.items() for line in text.strip().splitlines()
]


def test_every_command_has_two_to_four_examples_and_something_that_runs_it() -> None:
    assert set(EXAMPLES) == set(COMMANDS)
    assert all(2 <= len(text.strip().splitlines()) <= 4 for text in EXAMPLES.values())


@pytest.mark.parametrize(("command", "line"), LINES, ids=[line for _, line in LINES])
def test_an_example_is_valid(command: str, line: str) -> None:
    words = shlex.split(line.partition(" >")[0])  # without the shell's redirection
    assert words[0] == "specserve"
    assert build_parser().parse_args(words[1:]).command == command


@pytest.mark.parametrize("command", EXAMPLES)
def test_help_says_what_the_command_does_and_shows_its_examples(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"usage: specserve {command}" in shown
    assert all(f"  {line}\n" in shown for line in EXAMPLES[command].strip().splitlines())
