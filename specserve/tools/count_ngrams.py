"""Count tables for the n-gram drafters from text files: `specserve tables`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from specserve.errors import BadValue
from specserve.progress import ReportProgress, no_progress

KEEP = 64
"""Followers of a token; a drafter samples from as many by default."""


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


def count_ngrams(
    tokenizer: str,
    texts: Sequence[Path],
    out: Path,
    *,
    keep: int = KEEP,
    report_progress: ReportProgress = no_progress,
) -> str:
    """Write the tables; return a sentence about their contents. Raises BadValue."""
    # Imported late: the tokenizer's library takes seconds to import.
    from specserve.api.tokenizer import Tokenizer
    from specserve.drafters.ngram.tables import count_texts, save_tables

    if keep < 1:
        raise BadValue(f"--keep must be 1 or more, not {keep}", param="keep")
    encoder = Tokenizer.load(tokenizer)
    counts = count_texts(
        (encoder.encode(text, special=False) for text in _read_all(texts, report_progress)),
        keep=keep,
        fingerprint=encoder.fingerprint,
    )
    if not counts.vocab_size:
        raise BadValue("the files of --text are empty; name files with text in them", param="text")
    out.parent.mkdir(parents=True, exist_ok=True)
    save_tables(counts, out)
    tokens = int(counts.unigram.sum())
    return f"{out} has {len(counts.ids):,} pairs, from {tokens:,} tokens in {len(texts):,} files"


def _read_all(texts: Sequence[Path], report_progress: ReportProgress) -> Iterator[str]:
    from specserve.checkpoint_files import read_text  # late, as above

    for number, text in enumerate(texts):
        report_progress("counting", number / len(texts), text.name)
        yield read_text(text)
