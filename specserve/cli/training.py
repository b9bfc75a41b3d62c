"""The commands that train drafts on a target's own distribution: their options, and what they run.

Imports nothing that takes time.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from specserve.config.features import part
from specserve.progress import ProgressBar


def add_heads(parser: argparse.ArgumentParser) -> None:
    """Add the options of `specserve heads`."""
    _add_training(parser)
    parser.add_argument(
        "--heads", type=int, default=4, metavar="N", help="tokens that are drafted at once"
    )


def add_eagle(parser: argparse.ArgumentParser) -> None:
    """Add the options of `specserve eagle`."""
    _add_training(parser)
    parser.add_argument(
        "--draft-vocab",
        type=int,
        metavar="N",
        help="most frequent tokens of the texts that the head can draft (32,000, or all)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on training the head that is in --out"
    )


def add_dflash(parser: argparse.ArgumentParser) -> None:
    """Add the options of `specserve dflash`."""
    _add_training(parser)
    parser.add_argument(
        "--layers", type=int, default=2, metavar="N", help="layers of the draft; 2 by default"
    )
    parser.add_argument(
        "--block",
        type=int,
        default=8,
        metavar="N",
        help="rows of a block, from which up to N - 1 tokens are drafted (DSpark: N); 8 by default",
    )
    parser.add_argument(
        "--markov-rank",
        type=int,
        default=0,
        metavar="N",
        help="rank of a Markov head, with which it is a DSpark draft; 0, the default: none",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    """Add what every training on a target's own distribution takes."""
    parser.add_argument(
        "--target", required=True, metavar="M", help="a local directory or a hub name"
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="UTF-8 text of the kind that the target will write",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for draft.path")
    parser.add_argument(
        "--minutes",
        type=float,
        default=10,
        metavar="N",
        help="duration of the training, after the texts have been read",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads; torch's by default")


def heads(options: argparse.Namespace) -> None:
    """Train draft heads for a target."""
    _train("eagle.train_heads:fit", options, num_heads=options.heads)


def eagle(options: argparse.Namespace) -> None:
    """Train an EAGLE-3 head for a target."""
    own = {"draft_vocab": options.draft_vocab, "resume": options.resume}
    _train("eagle.train:train", options, **own)


def dflash(options: argparse.Namespace) -> None:
    """Train a DFlash or DSpark draft for a target."""
    own = {
        "num_layers": options.layers,
        "block_size": options.block,
        "markov_rank": options.markov_rank,
    }
    _train("eagle.dflash.train:train", options, **own)


def _train(name: str, options: argparse.Namespace, **own: object) -> None:
    """Call a feature's training with what all take and with its own options; print its summary."""
    train = part(name)
    with ProgressBar(sys.stderr) as bar:
        summary = train(
            options.target,
            options.text,
            options.out,
            minutes=options.minutes,
            threads=options.threads,
            report_progress=bar,
            **own,
        )
    print(summary)
