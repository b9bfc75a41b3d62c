"""The command line, in this process."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

import specserve
from docs._build.commands import commands
from specserve.cli.arguments import parse_count
from specserve.cli.main import main
from specserve.cli.parser import help_of
from specserve.errors import OutOfPages
from tests.support.checkpoints import add_tokenizer, make, perturb

FEW = ["--set", "cache.pages=60", "--set", "target.threads=1"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("pair")
    target = make("llama", root / "target")
    add_tokenizer(target)
    return str(target), str(perturb(target, root / "draft", 0.2))


def test_generate_prints_text_and_a_seed_repeats_it(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for drafting in (
        ["--draft", pair[1], "--gamma", "3"],
        ["--drafter", "none"],
        ["--draft", pair[1], "--gamma", "auto"],
    ):
        assert (
            main(
                [
                    "generate",
                    "--prompt",
                    "ab",
                    "--target",
                    pair[0],
                    "--max-tokens",
                    "9",
                    "--seed",
                    "4",
                    *drafting,
                    *FEW,
                ]
            )
            == 0
        )
        texts.append(capsys.readouterr().out)
    assert texts[0].strip()
    assert len(set(texts)) == 1


def test_generate_prints_ids_and_statistics_as_json(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--temperature",
        "0",
        "--max-tokens",
        "5",
        "--gamma",
        "2",
        "--verifier",
        "speculative",
        "--json",
    ]
    assert (
        main(
            ["generate", "--prompt", "ab", "--target", pair[0], "--draft", pair[1], *options, *FEW]
        )
        == 0
    )
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == {"text", "token_ids", "prompt_token_ids", "finish_reason", "stats"}
    assert set(printed["stats"]) == {
        "verifier", "lossless", "rounds", "drafted", "accepted", "mean_accepted_length",
        "target_passes", "anticipated", "resumed", "reproducible", "irreproducible",
        "drafts", "accepted_by_position", "cached_tokens", "queue_time_ms", "prefill_time_ms",
    }  # fmt: skip
    assert printed["stats"]["verifier"] == "speculative"
    assert len(printed["token_ids"]) == 5
    assert len(printed["prompt_token_ids"]) == 2


def test_a_config_file_and_overrides_reach_the_engine(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"target: {{path: {pair[0]}}}\ncache: {{pages: 1, page_size: 4}}\n")
    assert main(["generate", "--prompt", "abcdefgh", "--config", str(file)]) == 2
    assert "the context holds 4" in capsys.readouterr().err
    assert (
        main(
            [
                "generate",
                "--prompt",
                "abcdefgh",
                "--max-tokens",
                "2",
                "--config",
                str(file),
                "--set",
                "cache.pages=9",
            ]
        )
        == 0
    )


def test_inflate_writes_a_copy_of_the_asked_size(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["inflate", "--model", pair[0], "--params", "1M", "--out", str(tmp_path / "wide")])
        == 0
    )
    assert "has 1M parameters" in capsys.readouterr().out
    assert (tmp_path / "wide" / "config.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "COMMAND"),
        (["surf"], "invalid choice: 'surf'"),
        (["generate"], "--prompt"),
        (["generate", "--prompt", "a", "--gama", "3"], "unrecognized arguments: --gama 3"),
        (["generate", "--prompt", "a", "--gamma", "many"], "a whole number or auto"),
        (["generate", "--prompt", "a", "--set", "gamma"], "key=value"),
        (
            ["generate", "--prompt", "a", "--set", "speculation.gama=3"],
            "did you mean speculation.gamma?",
        ),
        (["generate", "--prompt", "a", "--temperature", "nan"], "temperature"),
        (["generate", "--prompt", "a", "--max-tokens", "0"], "max_tokens"),
        (["generate", "--prompt", "a", "--verifier", "fast"], "speculation.verifier"),
        (["generate", "--prompt", "a", "--target", "/nowhere/at/all"], "/nowhere/at/all"),
        (["generate", "--prompt", "a", "--config", "/nowhere.yaml"], "cannot be read"),
        (["serve", "--port", "70000"], "http.port"),
        (["serve", "--name", "a/b"], "such as my-model-8000"),
        (["serve", "--join", "auto", "--own-ray"], "not allowed with argument --join"),
        (["serve", "--own-ray", "--replace"], "say which with --join ADDRESS"),
        (["serve", "--own-ray", "--wait"], "say which with --join ADDRESS"),
        (["serve", "--join", "nowhere"], "cannot join nowhere: Invalid address format"),
        (["inflate", "--model", "/nowhere", "--params", "many", "--out", "x"], "200M, 1B or 8e9"),
        (["inflate", "--model", "/nowhere", "--params", "1M", "--out", "x"], "/nowhere"),
        (["quantize", "--model", "/nowhere", "--to", "int8", "--out", "x"], "--model /nowhere"),
    ],
)
def test_bad_usage_is_one_clear_line_and_exit_code_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("specserve: ")
    assert complaint in captured.err
    assert captured.err.count("\n") == 1


def test_an_empty_prompt_is_bad_usage(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--prompt", "", "--target", pair[0], *FEW]) == 2
    assert "the prompt is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "complaint", "code"),
    [(OutOfPages("no room"), "no room", 1), (KeyboardInterrupt(), "interrupted", 130)],
)
def test_a_failure_is_one_clear_line_and_an_exit_code(
    error: BaseException,
    complaint: str,
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("specserve.cli.main.generate_text", fail)
    assert main(["generate", "--prompt", "a"]) == code
    assert capsys.readouterr().err == f"specserve: {complaint}\n"


def test_help_shows_examples_and_the_version_is_the_packages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    assert "specserve generate --prompt" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"specserve {specserve.__version__}\n"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("200M", 200_000_000),
        ("1B", 10**9),
        ("8e9", 8 * 10**9),
        ("1.5b", 1_500_000_000),
        ("7000", 7000),
        ("3k", 3000),
    ],
)
def test_counts_are_parsed_as_people_write_them(text: str, number: int) -> None:
    assert parse_count(text) == number


def test_the_module_runs_and_help_does_not_wait_for_torch() -> None:
    program = """
import runpy, sys
sys.argv = ["specserve", "--version"]
try:
    runpy.run_module("specserve", run_name="__main__")
finally:
    print("torch" in sys.modules)
"""
    root = Path(specserve.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=False
    )
    assert done.returncode == 0
    assert done.stdout.splitlines() == [f"specserve {specserve.__version__}", "False"]


def test_the_public_names_are_these() -> None:
    assert set(specserve.__all__) == {
        "AsyncLLM",
        "LLM",
        "Output",
        "Sampling",
        "SpecserveError",
        "__version__",
        "errors",
        "open_ray_llm",
    }
    assert all(getattr(specserve, name) is not None for name in specserve.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        specserve.Nonsense  # noqa: B018


def test_help_says_what_each_argument_is_and_its_default() -> None:
    for name, _, parser in commands():
        shown = " ".join(parser.format_help().split())
        for action in parser._actions:
            assert action.help, f"{name} {action.dest}"
            if action.default not in (None, False, [], argparse.SUPPRESS):
                assert "default" in help_of(action), f"{name} {action.dest}"
                assert " ".join((help_of(action) % vars(action)).split()) in shown
