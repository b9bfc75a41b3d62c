"""Prompts and answers from which a draft for a chat model learns."""

from __future__ import annotations

from pathlib import Path

from lab.bench import chat_texts
from lab.bench.chat_prompts import KINDS, prompts
from lab.bench.tasks import read_tasks
from specserve.config.tree import DEMO


def test_prompts_are_the_same_for_a_seed_and_none_is_a_task_of_the_measurements() -> None:
    found = list(prompts(2048, seed=0))
    assert found == list(prompts(2048, seed=0))
    assert found != list(prompts(2048, seed=1))
    assert len(set(found)) > 1200
    measured = {task.prompt for tasks in read_tasks(per_kind=20).values() for task in tasks}
    assert len(measured) == 20 * len(KINDS)
    assert not measured & set(found)


def test_a_file_has_whole_conversations_and_is_not_written_again(tmp_path: Path) -> None:
    command = ["--target", str(DEMO / "target"), "--out", str(tmp_path), "--tokens", "2"]
    chat_texts.main([*command, "--prompts", "9"])
    (file,) = tmp_path.iterdir()
    text = file.read_text(encoding="utf-8")
    asked = list(prompts(9, seed=0))
    assert [f"user: {prompt}\nassistant:" in text for prompt in asked] == [True] * 9
    file.write_text("kept", encoding="utf-8")
    chat_texts.main([*command, "--prompts", "9"])
    assert file.read_text(encoding="utf-8") == "kept"


def test_the_model_writes_prompts_of_its_own(tmp_path: Path) -> None:
    command = ["--target", str(DEMO / "target"), "--tokens", "2", "--own", "--seed", "3"]
    for name in ("one", "other"):
        chat_texts.main([*command, "--out", str(tmp_path / name), "--prompts", "64"])
    one, other = (
        (tmp_path / name / "0000.txt").read_text(encoding="utf-8") for name in ("one", "other")
    )
    assert one == other
    assert 1 <= one.count("user: ") < 64, "prompts that it does not finish are left out"
    assert not any(prompt in one for prompt in prompts(64, seed=3))
    chat_texts.main([*command, "--out", str(tmp_path / "none"), "--prompts", "1"])
    assert (tmp_path / "none" / "0000.txt").read_text(encoding="utf-8") == ""
