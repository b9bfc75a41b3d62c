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
