"""Try every column of docs/measurements/families.md on a tiny checkpoint of each family.

`--quick` takes two families, and prints the page.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from tests.families.check import Row, check
from tests.families.configs import FAMILIES, MULTIMODAL
from tests.families.page import page
from tests.support import checkpoints

KNOWN = (*checkpoints.ARCHITECTURES, *FAMILIES)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="the page to write")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    decoders, text_parts = tuple(KNOWN), tuple(MULTIMODAL)
    if args.quick:
        decoders, text_parts = ("granite",), ("qwen2_vl",)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        text = page(check_all(decoders, Path(scratch)), check_all(text_parts, Path(scratch)))
    torch.set_num_threads(threads)
    if args.out is None:
        print(text)
    else:
        args.out.write_text(text, encoding="utf-8")


def check_all(names: Iterable[str], scratch: Path) -> dict[str, Row]:
    rows = {}
    for name in names:
        # A name may be that of a decoder and of a multimodal model.
        rows[name] = check(name, Path(tempfile.mkdtemp(dir=scratch)))
        print(name, *rows[name].cells, flush=True)
    return rows


if __name__ == "__main__":
    main()
