"""The language of the repository: words that are not the field's, and how docstrings open.

`../test_language.py` applies these rules to the tree.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.support.syntax import parsed

MAX_COLUMNS = 100

# Words that have a plain equivalent, and metaphors that hid what a module does.
BANNED = re.compile(
    r"\b("
    r"lest|anew|whoever|whomever|whosoever|whatsoever|nobody|be it ever so|tidings|heed(s|ed|ing)?|"
    r"forg[ie]v(e|es|en|ing)|perchance|hence(forth)?|hither|thither|thereof|wherein|whereof|"
    r"likewise|guess(es|ed|ing)?|guesser(s)?|judg(e|es|ed|ing|ment)|"
    r"crew|keeper|manuscript|scribe|strands?|trunk|lawful|unlawful|suspects?|acquit(s|ted|tal)?|"
    r"metronome|siege[sd]?|blows?|victims?|stranger(s)?|misshapen|revive[sd]?|"
    r"forgets?|forgot(ten)?|forgetting|set back|copyist|outlet|tally|tallies|foreseen|"
    r"tells?|told|telling|mishaps?|moods?|boastful|sworn|wishes|unasked|"
    r"borne out|what gives way|loses? (its|their) places?|riders?|dearest"
    r")\b",
    re.IGNORECASE,
)
BY_HAND = ("specserve", "lab", "tests", "docs/design", "docs/guides", "README", "CONTRIBUTING")
"""Places without pages that a command writes."""
# Words that are wrong in some places only: a draft token is rejected, an HTTP request is refused; a
# server is behind a proxy, a token comes after another.
BANNED_IN = {
    ("specserve/engine", "specserve/sampling", "specserve/drafters"): re.compile(
        r"\b(refus(e|es|ed|al|als|ing)|laws?)\b", re.IGNORECASE
    ),
    BY_HAND: re.compile(
        r"\b(those of|so many|asked|"
        r"behind (\S+ ){0,2}(tokens?|positions?|steps?|prompts?|verdicts?))\b",
        re.IGNORECASE,
    ),
}
WORDS_IN_NAMES = frozenset(
    """
    lest anew whoever nobody tidings heed forgive crew keeper manuscript strand trunk lawful suspect
    suspects acquit metronome siege blow victim victims stranger strangers misshapen revive guess
    guesses guesser judge judged judges copyist tally tallies foreseen forget forgets told tells
    tell telling mood outlet mishap law laws rider riders riding dearest
    """.split()
)
OPENINGS = frozenset(
    """
    of by with to for from at in on as likewise without until whether into under over behind before
    after between beside within where when while once if whatever wherever however what who whose
    which that this it its they their there those these or and but not no none never nothing only
    also so such same such
    """.split()
)
"""First words that neither name a thing nor say what a function does."""


def findings(path: Path, *, root: Path | None = None) -> Iterator[tuple[int, str]]:
    """Yield the line and the reason of everything in `path` that breaks a rule."""
    name = str(path.relative_to(root)) if root else str(path)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from _wide_lines(text)
        yield from _python(name, text)
    else:
        yield from _prose(name, text)


def _wide_lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_COLUMNS:
            yield number, f"{len(line)} columns"


def _python(name: str, text: str) -> Iterator[tuple[int, str]]:
    tree = parsed(text)
    for node in ast.walk(tree):
        documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
        if isinstance(node, documented) and (doc := ast.get_docstring(node)):
            line = node.body[0].lineno
            yield from _words(name, doc, line)
            first = re.split(r"[\s,.:;()]", doc, maxsplit=1)[0].lower()
            if first in OPENINGS:
                yield line, f"docstring opens with {first!r}"
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _identifier(node.name, node.lineno)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield from _identifier(node.id, node.lineno)
        elif isinstance(node, ast.arg):
            yield from _identifier(node.arg, node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from _words(name, token.string, token.start[0])


def _prose(name: str, text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        yield from _words(name, line, number)


def _words(name: str, text: str, line: int) -> Iterator[tuple[int, str]]:
    for offset, part in enumerate(text.splitlines()):
        for found in BANNED.finditer(part):
            yield line + offset, f"the word {found[0]!r}"
        for places, words in BANNED_IN.items():
            if name.startswith(places):
                for found in words.finditer(part):
                    yield line + offset, f"the word {found[0]!r}"


def _identifier(identifier: str, line: int) -> Iterator[tuple[int, str]]:
    parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)
    for part in parts:
        if part.lower() in WORDS_IN_NAMES:
            yield line, f"the name {identifier}"
