"""The demo pair's corpus: Python's standard library, one file in fifty held out.

`python -m specserve.demo.corpus DIR` writes both parts as text files.
"""

from __future__ import annotations

import sys
import sysconfig
import zlib
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

from specserve.api.tokenizer import Tokenizer
from specserve.config.tree import DEMO

LEFT_OUT = {
    "site-packages",
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "encodings",
    "pydoc_data",
}
"""Directories that are not the library itself, or contain tables."""
MAX_TOKENS_PER_FILE = 1024


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts of the library's modules."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


@cache
def standard_library() -> Corpus:
    """Return the library's modules, one in fifty held out by the checksum of its name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train: list[str] = []
    held_out: list[str] = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if LEFT_OUT & set(name.parts):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        (held_out if zlib.crc32(str(name).encode()) % 50 == 0 else train).append(text)
    return Corpus(tuple(train), tuple(held_out))


def held_out_prompts(*, count: int, length: int) -> tuple[tuple[int, ...], ...]:
    """Return stretches of held-out files, none of which has tokens of another.

    The beginnings of the files come first, after their first lines; a short file's is shorter.
    Later ones are as far from one another as they are long. Raises ValueError if there are fewer.
    """
    files = held_out_files()
    found = [tokens[:length] for tokens in files]
    for start in range(2 * length, max(map(len, files)), 2 * length):
        stretches = (tokens[start : start + length] for tokens in files)
        found += [stretch for stretch in stretches if len(stretch) == length]
    if len(found) < count:
        raise ValueError(
            f"the held-out files have {len(found)} prompts of {length} tokens, and not {count}"
        )
    return tuple(found[:count])


@cache
def held_out_files() -> tuple[tuple[int, ...], ...]:
    """Return the tokens of the held-out files of some length, after their first lines."""
    tokenizer = Tokenizer.load(DEMO / "target")
    contents = [content[200:] for content in standard_library().held_out if len(content) > 4000]
    return tuple(tokenizer.encode(content) for content in contents)


def held_out_tokens(limit: int) -> list[int]:
    """Return up to `limit` tokens of held-out files, concatenated."""
    return list(chain.from_iterable(file[:MAX_TOKENS_PER_FILE] for file in held_out_files()))[
        :limit
    ]


def write(directory: Path) -> None:
    """Write `directory`/train and `directory`/held_out, a file for each module."""
    corpus = standard_library()
    for name, texts in (("train", corpus.train), ("held_out", corpus.held_out)):
        (directory / name).mkdir(parents=True, exist_ok=True)
        for i, text in enumerate(texts):
            (directory / name / f"{i:04}.py").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
