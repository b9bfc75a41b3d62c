"""The default prompts, code and questions, and prompts read from a file."""

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

QUESTIONS = (
    "What is the capital of France?",
    "Explain why the sky is blue to a child of eight.",
    "Write a Python function that returns the n-th Fibonacci number, and explain its cost.",
    "List five things to check before you buy a used bicycle.",
    "Summarize in two sentences how a bill becomes a law in a parliament of two chambers.",
    'Translate into French: "The train leaves at nine, so please be there a little earlier."',
    "Give three reasons for and three against working from home.",
    "Write a short letter to a landlord who has not repaired a broken heater for two weeks.",
    "What is the difference between a list and a tuple in Python?",
    "Describe the water cycle in four steps.",
    "How many minutes are there in a week? Show the calculation.",
    "Return a JSON object with the keys name, age and city for an invented person.",
    "Suggest a dinner from rice, eggs and spinach, with its steps.",
    "Who was Ada Lovelace, and what is she known for?",
    "Rewrite in plain words: The aforementioned party shall forthwith remit the sum due.",
    "Tell a story of three sentences about a lighthouse and a fox.",
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
