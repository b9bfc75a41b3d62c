"""The default prompts, and prompts read from a file."""

from __future__ import annotations

import json
from pathlib import Path

from specserve.errors import BadValue

CODE_PROMPTS = (
    "def read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "import argparse\nimport sys\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
    "def fibonacci(n):\n    if n < 2:\n",
    "import unittest\n\n\nclass TestParser(unittest.TestCase):\n    def setUp(self):\n",
    "def binary_search(items, wanted):\n    low, high = 0, len(items)\n",
    (
        "class Node:\n    def __init__(self, key, value, left=None, right=None):\n"
        "        self.key = key\n"
    ),
    "import socket\n\n\ndef connect(host, port, timeout=None):\n    sock = socket.socket(",
    "def parse_header(line):\n    name, sep, value = line.partition(':')\n    if not sep:\n",
    (
        "import os\n\n\ndef walk(top):\n    for name in os.listdir(top):\n"
        "        path = os.path.join(top, name)\n"
    ),
    (
        "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n"
        "        self.mutex = threading.Lock()\n"
    ),
    "def gcd(a, b):\n    while b:\n",
    "import json\n\n\ndef load_config(filename):\n    with open(filename) as f:\n",
    "def decorator(func):\n    @functools.wraps(func)\n    def wrapper(*args, **kwargs):\n",
    "class Iterator:\n    def __iter__(self):\n        return self\n\n    def __next__(self):\n",
    "import re\n\n_pattern = re.compile(r'\\s+')\n\n\ndef split_words(text):\n",
)


def read_prompts(file: Path) -> tuple[str, ...]:
    """Read one prompt per line: text, or a JSON object with a member `prompt`.

    Empty lines are skipped. Raises BadValue if there is no prompt.
    """
    try:
        # Not splitlines(): a JSON string may contain other line separators.
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadValue(f"--prompts {file} cannot be read: {error}", param="prompts") from error
    prompts = tuple(
        _prompt(line, f"--prompts {file}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )
    if not prompts:
        raise BadValue(f"--prompts {file} has no prompt in it; write one a line", param="prompts")
    return prompts


def _prompt(line: str, where: str) -> str:
    """Return the prompt of one line. A line that is not a JSON object is text."""
    try:
        value = json.loads(line)
    except ValueError:
        return line
    if not isinstance(value, dict):
        return line
    prompt = value.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise BadValue(f"{where} is a JSON object without a text as its prompt", param="prompts")
    return prompt
