"""Shell completion: bash is run with the script; the scripts of the others are held against the arguments."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from specserve.cli.arguments import parser
from specserve.cli.completion import SHELLS, Kind, commands, script
from specserve.config.tree import DRAFT_KINDS

ASK = """
source /dev/stdin <<'SCRIPT'
{script}
SCRIPT
compopt() {{ :; }}  # knows no completion that is under way
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_specserve
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(*words: str, cwd: Path | None = None) -> list[str]:
    """What bash offers for the last of the words."""
    text = ASK.format(script=script("bash", parser()), words=shlex.join(["specserve", *words]))
    done = subprocess.run(
        ["bash", "--norc", "-c", text], capture_output=True, text=True, cwd=cwd, check=True
    )
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if line]


def test_bash_knows_whom_to_ask() -> None:
    text = script("bash", parser()) + "complete -p specserve\n"
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
        (["serve", "--set", "speculation.max"], ["speculation.max_gamma="]),
        (["serve", "--set", "speculation.max_gamma", "="], []),
        (["serve", "--set", "speculation.max_gamma", "=", "3"], []),
        (["plan", "--dtype", "b"], ["bfloat16"]),
        (["reproduce", "ta"], ["table-1"]),
        (["completion", "z"], ["zsh"]),
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
    assert completed("simulate", "my", cwd=tmp_path) == ["my model", "my.yaml"]
    assert completed("tables", "--text", "my.yaml", "my", cwd=tmp_path) == [
        "my model",
        "my.yaml",
    ], "one file may follow another"
    assert completed("serve", "--config", "my.yaml", "my", cwd=tmp_path) == []


def test_every_command_and_every_option_is_in_every_script() -> None:
    for shell in SHELLS:
        text = script(shell, parser())
        for command in commands(parser()):
            assert command.name in text
            for option in command.options:
                for name in option.names:
                    assert (name.lstrip("-") if shell == "fish" else name) in text, (
                        shell,
                        command.name,
                        name,
                    )


def test_values_are_what_the_config_takes_and_sections_are_no_keys() -> None:
    found = {
        command.name: {option.names[-1]: option.value for option in command.options}
        for command in commands(parser())
    }
    assert found["generate"]["--drafter"].words == DRAFT_KINDS
    keys = found["serve"]["--set"]
    assert keys.kind is Kind.KEYS
    assert {"model", "http.port", "speculation.anticipation.fanout"} <= set(keys.words)
    assert not {"http", "speculation.anticipation"} & set(keys.words)


def test_a_script_for_no_shell_is_refused() -> None:
    with pytest.raises(KeyError):
        script("csh", parser())
