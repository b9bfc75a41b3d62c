"""A gateway's process must have no torch, and the same tokenizers all the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from specserve.config.tree import DEMO
from tests.support.checkpoints import CONFIGS, add_tokenizer

PROGRAM = """
import json, sys
from specserve.api.tokenizer import hide_torch
if sys.argv[1] == "hidden":
    hide_torch()
import specserve.cluster.deployments, specserve.api.app, specserve.api.generation
from specserve.api.tokenizer import Tokenizer

text, found = "def read(path):\\n    return 'M\u00f6hren'", []
for path in sys.argv[2:]:
    tokenizer = Tokenizer.load(path)
    ids = tokenizer.encode(text)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    found.append([tokenizer.fingerprint, ids, tokenizer.decode(ids), chat])
print(json.dumps([found, "torch" in sys.modules]))
"""


def run(*arguments: str) -> tuple[list[object], bool]:
    """Return the properties of tokenizers in a new process, and whether it imports torch."""
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], check=True, capture_output=True, text=True
    ).stdout
    found, has_torch = json.loads(output)
    return found, has_torch


def test_tokenizers_of_all_architectures_are_the_same_without_torch(tmp_path: Path) -> None:
    paths = [str(DEMO / "target")]
    for name, make_config in CONFIGS.items():
        make_config().save_pretrained(tmp_path / name)
        add_tokenizer(tmp_path / name)
        paths.append(str(tmp_path / name))
    hidden, has_torch = run("hidden", *paths)
    assert not has_torch
    assert len(hidden) == len(paths)
    assert (hidden, True) == run("as it is", *paths)
