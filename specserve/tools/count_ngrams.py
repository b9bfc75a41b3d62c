"""Tables for the statistical drafters, counted from text files: the work behind `specserve tables`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from specserve.errors import BadValue
from specserve.progress import Tell, silent

KEEP = 64  # followers of a token, as many as a drafter draws from by default


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer", required=True, metavar="M", help="the target's directory or hub name"
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="UTF-8; a large corpus as several files, each read whole",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="such as DIR/tables.safetensors, where draft.path DIR finds it",
    )
    parser.add_argument(
        "--keep",
        type=int,
        default=KEEP,
        metavar="N",
        help="followers of each token, the most frequent",
    )


def tabulate(
    tokenizer: str, texts: Sequence[Path], out: Path, *, keep: int = KEEP, tell: Tell = silent
) -> str:
    """Writes the tables; says what is in them."""
    from specserve.api.tokenizer import (
        Text,
    )  # late: the tokenizer's library takes seconds to import
    from specserve.drafters.ngram.tables import count, save

    if keep < 1:
        raise BadValue(f"--keep must be 1 or more, not {keep}", param="keep")
    speaks = Text.load(tokenizer)
    counts = count(
        (speaks.encode(text, special=False) for text in _read_all(texts, tell)),
        keep=keep,
        fingerprint=speaks.fingerprint,
    )
    if not counts.vocab_size:
        raise BadValue("the files of --text are empty; name files with text in them", param="text")
    out.parent.mkdir(parents=True, exist_ok=True)
    save(counts, out)
    return f"{out} has {len(counts.ids):,} pairs, from {int(counts.unigram.sum()):,} tokens in {len(texts):,} files"


def _read_all(texts: Sequence[Path], tell: Tell) -> Iterator[str]:
    for number, text in enumerate(texts):
        tell("counting", number / len(texts), text.name)
        yield read_text(text)


def read_text(text: Path) -> str:
    """Raises BadValue."""
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadValue(
            f"--text {text} cannot be read as UTF-8 text: {error}", param="text"
        ) from error
