"""The pages as the tests see them: code blocks, links, headings, code spans, tables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from docs._build.pages import PAGES
from specserve.config.tree import DEMO

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WRITTEN = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))
URL = "http://127.0.0.1:8000"
STAND_INS = (
    ("--target DIR-OR-HUB-NAME", f"--target {DEMO / 'target'}"),
    ("--tokenizer DIR-OR-HUB-NAME", f"--tokenizer {DEMO / 'target'}"),
    ("--model DIR-OR-HUB-NAME", f"--model {DEMO / 'target'}"),
    ("--draft DIR-OR-HUB-NAME", f"--draft {DEMO / 'draft'}"),
    ('"model": "smollm2"', '"model": "demo"'),
    ('model="smollm2"', 'model="demo"'),
)
"""The shipped pair, for the places where readers put their own models, and for `make serve`'s."""
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
EXCUSE = re.compile(r"<!-- not run: (.+?) -->\s*\Z")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. `excuse` says why it is checked and not run."""

    page: Path
    line: int
    language: str
    text: str
    excuse: str | None

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def asks_server(self) -> bool:
        return self.excuse is None and self.language in ("sh", "python") and URL in self.text

    def filled(self, url: str) -> str:
        """Return the text with the shipped pair for readers' models and the tests' server."""
        text = self.text.replace(URL, url)
        for placeholder, pair in STAND_INS:
            text = text.replace(placeholder, pair)
        return text


def programs(blocks: Sequence[Block]) -> list[Block]:
    """Return what is run as one program: each shell block, and all the Python of a page.

    A Python block may use what the blocks before it have made.
    """
    alone = [block for block in blocks if block.language != "python"]
    pages = dict.fromkeys(block.page for block in blocks if block.language == "python")
    return alone + [
        _joined([block for block in blocks if block.page == page and block.language == "python"])
        for page in pages
    ]


def _joined(blocks: Sequence[Block]) -> Block:
    """Join blocks with every line where the page has it, so that tracebacks are right."""
    text = ""
    for block in blocks:
        text += "\n" * (block.line - text.count("\n")) + block.text
    return replace(blocks[0], text=text)


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a shell block; its output goes to `into`."""

    words: tuple[str, ...]
    into: str | None = None

    @property
    def program(self) -> str:
        return Path(self.words[0]).name


def blocks() -> list[Block]:
    return [
        block for page in WRITTEN for block in blocks_of(page, page.read_text(encoding="utf-8"))
    ]


def blocks_of(page: Path, markdown: str) -> Iterator[Block]:
    for found in FENCE.finditer(markdown):
        indent = len(found["indent"])
        text = "".join(line[indent:] for line in found["text"].splitlines(keepends=True))
        excuse = EXCUSE.search(markdown[: found.start()])
        yield Block(
            page,
            markdown.count("\n", 0, found.start()) + 1,
            found["language"],
            text,
            None if excuse is None else excuse[1],
        )


def commands(text: str) -> Iterator[Command]:
    """Yield the commands of a shell block, without the variables that are set before them."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r" && ", line.removeprefix("$ ")):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words:
                yield (
                    Command(tuple(words[:-2]), words[-1])
                    if ">" in words[-2:-1]
                    else Command(tuple(words))
                )


NAMES = (
    *(str(page.relative_to(ROOT)) for page in WRITTEN),
    *(f"docs/{name}" for name in PAGES),
)
"""Paths from the top of the repository."""


@cache
def page(name: str) -> str:
    """Return a page that is written by hand or by a command, or one made from the program."""
    file = ROOT / name
    return (
        file.read_text(encoding="utf-8") if file in WRITTEN else PAGES[name.removeprefix("docs/")]()
    )


def prose(markdown: str) -> str:
    """Return the page without blocks of code."""
    return FENCE.sub("", markdown)


def spans(markdown: str) -> list[str]:
    """Return the code spans of the prose."""
    return re.findall(r"`([^`\n]+)`", prose(markdown))


def links(markdown: str) -> list[str]:
    """Return the links of the prose that lead to other pages or files."""
    return [
        link
        for link in LINK.findall(re.sub(r"`[^`\n]*`", "", prose(markdown)))
        if not re.match(r"\w+:", link)
    ]


def anchors(markdown: str) -> set[str]:
    """Return the anchors of the page, as the site names its headings."""
    return {slug(heading) for heading in HEADING.findall(prose(markdown))}


def slug(heading: str) -> str:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def rows(markdown: str) -> Iterator[list[str]]:
    """Yield the cells of every table row that is neither a head nor a rule."""
    lines = markdown.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if (
            line.startswith("|")
            and not line.startswith("|---")
            and not following.startswith("|---")
        ):
            yield [cell.strip() for cell in line.strip("|").split("|")]
