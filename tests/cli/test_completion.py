"""Shell completion: bash runs its script, and the scripts of all shells hold all arguments."""

from __future__ import annotations

import argparse
import shlex
import subprocess
from pathlib import Path

import pytest

from specserve.cli.arguments import build_parser
from specserve.cli.completion import SHELLS, script
from specserve.config.sections import DRAFT_KINDS

PROGRAM = """
source /dev/stdin <<'SCRIPT'
{script}
SCRIPT
compopt() {{ :; }}  # the builtin fails outside of a completion
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_specserve
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(*words: str, cwd: Path | None = None) -> list[str]:
    """Return what bash offers for the last of the words."""
    text = PROGRAM.format(
        script=script("bash", build_parser()), words=shlex.join(["specserve", *words])
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", text], capture_output=True, text=True, cwd=cwd, check=True
    )
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if line]


def test_the_script_registers_the_completion() -> None:
    text = script("bash", build_parser()) + "complete -p specserve\n"
    done = subprocess.run(
        ["bash", "--norc", "-c", text], capture_output=True, text=True, check=True
    )
    assert done.stdout == "complete -F _specserve specserve\n"


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ge"], ["generate"]),
        (["serve", "--t"], ["--target", "--tp"]),
        (["generate", "--prompt", "a", "--drafter", "prompt"], ["prompt_copy"]),
        (["generate", "--verifier", "sp"], ["speculative"]),
        (["generate", "--json", "--tr"], ["--trace"]),
        (["generate", "--prompt", "a", "--json", ""], []),
        (["serve", "--j"], ["--join"]),
        (["serve", "--join", ""], ["auto"]),
        (["serve", "--set", "speculation.max"], ["speculation.max_gamma="]),
        (["serve", "--set", "speculation.max_gamma", "="], []),
        (["serve", "--set", "speculation.max_gamma", "=", "3"], []),
        (["plan", "--dtype", "b"], ["bfloat16"]),
        (["completion", "z"], ["zsh"]),
        (["keys", "c"], ["create", "check"]),
        (["bench", "--url", ""], []),
    ],
)
def test_bash_offers(words: list[str], offered: list[str]) -> None:
    assert completed(*words) == offered


def test_bash_offers_files_and_directories_where_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "my model").mkdir()
    (tmp_path / "my.yaml").write_text("")
    assert completed("serve", "--config", "my", cwd=tmp_path) == ["my model", "my.yaml"]
    assert completed("serve", "--target", "my", cwd=tmp_path) == ["my model"]
    assert completed("tables", "--text", "my.yaml", "my", cwd=tmp_path) == [
        "my model",
        "my.yaml",
    ], "one file may follow another"
    assert completed("serve", "--config", "my.yaml", "my", cwd=tmp_path) == []


def test_bash_offers_options_after_several_files() -> None:
    assert completed("tables", "--text", "one.txt", "two.txt", "--o") == ["--out"]


def test_every_command_and_every_option_is_in_every_script() -> None:
    (commands,) = (
        action.choices
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    for shell in SHELLS:
        text = script(shell, build_parser())
        for command, parser in commands.items():
            assert command in text
            for action in parser._actions:
                for name in action.option_strings:
                    expected = name.lstrip("-") if shell == "fish" else name
                    assert expected in text, (shell, command, name)


def test_values_are_what_the_config_takes_and_sections_are_no_keys() -> None:
    assert completed("generate", "--drafter", "") == list(DRAFT_KINDS)
    keys = completed("serve", "--set", "")
    assert {"model=", "http.port=", "speculation.anticipation.fanout="} <= set(keys)
    assert not {"http=", "speculation.anticipation="} & set(keys)


def test_a_script_for_no_shell_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="csh"):
        script("csh", build_parser())
