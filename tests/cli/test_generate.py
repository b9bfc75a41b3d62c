"""Lines of `specserve generate` on stderr, and refusals before any weights are read."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specserve.api.tokenizer import Tokenizer
from specserve.cli.config_options import NO_DRAFT_NOTICE
from specserve.cli.main import main
from tests.support.checkpoints import CONTEXT, add_tokenizer, make, perturb

FEW = ["--max-tokens", "5", "--temperature", "0", "--set", "cache.pages=90", "--set"]
FEW += ["target.threads=1"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("pair")
    target = make("llama", root / "target")
    add_tokenizer(target)
    return str(target), str(perturb(target, root / "draft", 0.2))


@pytest.fixture
def unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_to_open(*_: object, **__: object) -> None:
        pytest.fail("weights were read before the mistake was found")

    monkeypatch.setattr("specserve.llm.inprocess.open_target", refuse_to_open)


def test_the_speed_and_the_worth_of_the_draft_go_to_stderr_and_the_text_alone_to_stdout(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "--prompt", "ab", "--target", pair[0], "--draft", pair[1], *FEW]
    assert main([*words, "--gamma", "2", "--json"]) == 0
    shown = capsys.readouterr()
    stats = json.loads(shown.out)["stats"]
    found = re.search(
        r"^5 tokens in \d+\.\d\d s, \d+ tokens/s; (\d+) of (\d+) draft tokens accepted, "
        r"(\d+) passes of the target$",
        shown.err,
        re.MULTILINE,
    )
    assert found is not None, shown.err
    assert [int(number) for number in found.groups()] == [
        stats["accepted"],
        stats["drafted"],
        stats["target_passes"],
    ]
    assert NO_DRAFT_NOTICE not in shown.err


def test_without_a_draft_plain_decoding_is_said_at_once_unless_it_was_asked_for(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "--prompt", "ab", "--target", pair[0], *FEW]
    shown = {}
    for asked in ("", "--draft none", "--drafter none", "--set draft.kind=none"):
        assert main([*words, *asked.split()]) == 0
        shown[asked] = capsys.readouterr()
    assert shown[""].err.splitlines().count(NO_DRAFT_NOTICE) == 1
    assert [asked for asked in shown if NO_DRAFT_NOTICE in shown[asked].err] == [""]
    assert len({each.out for each in shown.values()}) == 1
    assert "no draft tokens" in shown["--draft none"].err


def test_draft_none_is_stronger_than_the_draft_of_a_config_file(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pair.yaml"
    file.write_text(f"target: {{path: {pair[0]}}}\ndraft: {{path: {pair[1]}, kind: neural}}\n")
    words = ["generate", "--prompt", "ab", "--config", str(file), *FEW]
    assert main([*words, "--draft", "none"]) == 0
    assert "no draft tokens" in capsys.readouterr().err
    assert main([*words, "--draft", "none", "--drafter", "neural"]) == 2
    assert "--draft none contradicts --drafter neural" in capsys.readouterr().err


@pytest.mark.usefixtures("unopened")
@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ("", "the prompt is empty"),
        ("ab\udcff", "--prompt is not UTF-8"),
        ("a" * (CONTEXT + 1), f"but the context holds {CONTEXT}, new tokens included"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused_before_weights_are_read(
    prompt: str, complaint: str, pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--prompt", prompt, "--target", pair[0], "--draft", "none"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert complaint in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.usefixtures("unopened")
def test_a_target_without_a_tokenizer_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = make("llama", tmp_path / "bare")
    capsys.readouterr()  # the library's bar
    assert main(["generate", "--prompt", "a", "--target", str(bare), "--draft", "none"]) == 2
    shown = capsys.readouterr()
    assert f"no tokenizer can be loaded from {bare}: it has no tokenizer.json; copy" in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.usefixtures("unopened")
def test_a_longer_context_than_the_models_is_refused(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "--prompt", "a", "--target", pair[0], "--draft", "none", "--set"]
    assert main([*words, f"limits.max_context={CONTEXT + 1}"]) == 2
    shown = capsys.readouterr()
    assert f"limits.max_context {CONTEXT + 1} is beyond the context of the target" in shown.err
    assert f"{CONTEXT} positions; lower it" in shown.err


def test_more_tokens_than_the_context_has_room_for_are_said_to_end_there(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "--prompt", "abcd", "--target", pair[0], "--draft", "none", *FEW]
    words += ["--set", "limits.max_context=8", "--max-tokens", "9", "--json"]
    assert main(words) == 0
    shown = capsys.readouterr()
    printed = json.loads(shown.out)
    room = 8 - len(printed["prompt_token_ids"])
    assert f"--max-tokens 9 is more than fits: the context holds 8 tokens, {8 - room} of" in (
        shown.err
    )
    assert f"the text ends after {room}\n" in shown.err
    assert len(printed["token_ids"]) <= room


def test_the_collector_runs_again_once_the_models_are_open(pair: tuple[str, str]) -> None:
    assert main(["generate", "--prompt", "ab", "--target", pair[0], "--draft", "none", *FEW]) == 0
    assert gc.isenabled()


def test_the_program_ends_with_its_exit_code_and_all_that_it_printed(
    pair: tuple[str, str],
) -> None:
    words = ["generate", "--prompt", "ab", "--target", pair[0], "--draft", "none", *FEW]
    done = subprocess.run(
        [sys.executable, "-m", "specserve", *words, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, len(json.loads(done.stdout)["token_ids"])) == (0, 5)
    assert "passes of the target" in done.stderr


@pytest.fixture(scope="module")
def chat_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    target = make("llama", tmp_path_factory.mktemp("chat") / "target")
    tokenizer = add_tokenizer(target)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(target)
    return str(target)


@pytest.mark.parametrize(
    ("has_template", "flags", "prompt"),
    [
        (True, [], "<user>ab"),
        (True, ["--chat"], "<user>ab"),
        (True, ["--no-chat"], "ab"),
        (False, [], "ab"),
        (False, ["--chat"], "user: ab\nassistant:"),
    ],
)
def test_a_prompt_is_a_message_where_the_model_has_a_template_or_chat_is_requested(
    pair: tuple[str, str],
    chat_target: str,
    has_template: bool,
    flags: list[str],
    prompt: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = chat_target if has_template else pair[0]
    words = ["generate", "--prompt", "ab", "--target", target, "--draft", "none", *FEW]
    assert main([*words, *flags, "--json"]) == 0
    ids = json.loads(capsys.readouterr().out)["prompt_token_ids"]
    assert Tokenizer.load(Path(target)).decode(ids) == prompt


@pytest.mark.usefixtures("unopened")
def test_an_empty_message_is_refused(chat_target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "", "--target", chat_target, "--draft", "none"]) == 2
    assert "the prompt is empty" in capsys.readouterr().err


def test_the_text_is_written_as_it_comes_and_is_that_of_one_piece(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "--prompt", "ab", "--target", pair[0], "--draft", "none", *FEW]
    assert main([*words, "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    written: list[str] = []
    monkeypatch.setattr(sys.stdout, "write", written.append)
    assert main(words) == 0
    assert "".join(written) == text + "\n"
    assert len([piece for piece in written if piece.strip()]) > 1
