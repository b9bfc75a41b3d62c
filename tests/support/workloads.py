"""Compare the texts of random workloads in two checkouts, as a check of a change of structure.

`python -m tests.support.workloads ROOT` generates the same workloads in this checkout and in that
at ROOT, and prints how many have the same tokens. Each engine (a kind of draft, a dtype) serves
its share of them; a workload is a few prompts at once under random sampling parameters.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from specserve import LLM, Sampling

KINDS = ("none", "neural", "prompt_copy", "max_gram", "layer_skip")
DTYPES = ("bfloat16", "float32")
PROMPTS = (
    "def main():",
    "class Stack:\n    def __init__(self):\n        self.items = []\n",
    "import os\nimport sys\n\n\ndef read(path):\n",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n",
    "x",
    "# Return the sum of a list.\ndef total(values):\n    return",
)


def workload(chance: random.Random) -> tuple[list[str], dict[str, Any]]:
    """Return prompts, and the parameters under which all are continued."""
    parameters: dict[str, Any] = {
        "max_tokens": chance.choice([1, 8, 24]),
        "temperature": chance.choice([0.0, 0.0, 0.8, 1.0]),
        "top_p": chance.choice([1.0, 0.9]),
        "top_k": chance.choice([0, 40]),
        "min_p": chance.choice([0.0, 0.02]),
        "frequency_penalty": chance.choice([0.0, 0.0, 0.3]),
        "repetition_penalty": chance.choice([1.0, 1.0, 1.2]),
        "seed": chance.randrange(1000),
        "n": chance.choice([1, 1, 2]),
        "ignore_eos": chance.random() < 0.5,
    }
    if (gamma := chance.choice([None, 1, 4])) is not None:
        parameters["speculation"] = {"gamma": gamma}
    return chance.choices(PROMPTS, k=chance.choice([1, 2, 6])), parameters


def digests(
    count: int, *, kinds: Sequence[str] = KINDS, dtypes: Sequence[str] = DTYPES
) -> dict[str, str]:
    """Return a digest of the tokens of each workload, in the package that is on the path."""
    found: dict[str, str] = {}
    engines = list(product(kinds, dtypes))
    for kind, dtype in engines:
        keys: dict[str, Any] = {"target.dtype": dtype, "draft.dtype": dtype, "draft.kind": kind}
        with LLM(**{**keys, "demo.size": "none", "target.threads": 1}) as llm:
            for number in range(count // len(engines)):
                prompts, parameters = workload(random.Random(number))
                outputs = llm.generate(prompts, Sampling(**parameters))
                tokens = json.dumps([output.token_ids for output in outputs])
                name = f"{kind} {dtype} {number}"
                found[name] = hashlib.sha256(tokens.encode()).hexdigest()
    return found


def of_checkout(root: Path, count: int) -> dict[str, str]:
    """Return the digests of the checkout at `root`."""
    command = [
        sys.executable,
        "-P",
        str(Path(__file__).resolve()),
        "--print",
        "--count",
        str(count),
    ]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, check=True)
    digests_of_root: dict[str, str] = json.loads(done.stdout)
    return digests_of_root


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("root", type=Path, nargs="?", help="another checkout")
    parser.add_argument("--count", type=int, default=650, help="workloads (default: 650)")
    parser.add_argument("--print", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.print:
        print(json.dumps(digests(options.count)))
        return
    if options.root is None:
        parser.error("name another checkout")
    here = of_checkout(Path(__file__).resolve().parents[2], options.count)
    there = of_checkout(options.root.resolve(), options.count)
    same, total = Counter[str](), Counter[str]()
    for name, digest in here.items():
        engine = name.rpartition(" ")[0]
        total[engine] += 1
        same[engine] += digest == there[name]
    for engine in total:
        print(f"{engine}: {same[engine]} of {total[engine]} the same")
    print(f"{same.total()} of {total.total()} workloads have the same tokens in both")


if __name__ == "__main__":
    main()
