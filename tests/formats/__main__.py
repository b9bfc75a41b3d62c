"""Make the quantised checkpoints of `made` with their own libraries, which it installs."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.formats.check import MADE, Said, say
from tests.formats.make import FORMATS
from tests.support import checkpoints

LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "gptqmodel": ("torch", "transformers", "accelerate", "setuptools", "gptqmodel==7.7.0"),
    "compressed-tensors": ("torch", "bitsandbytes==0.50.2", "llmcompressor==0.14.0.1"),
}
BUILT_WITH_TORCH = "gptqmodel"
"""The package whose build needs torch to be there."""


def library_of(kind: str) -> str:
    return "gptqmodel" if kind.startswith(("gptq", "awq")) else "compressed-tensors"


def environment(library: str, root: Path) -> Path:
    """Return the Python of an environment that has a library; install it if it is new."""
    python = root / library / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", root / library], check=True)
        for package in LIBRARIES[library]:
            isolation = ["--no-build-isolation"] * package.startswith(BUILT_WITH_TORCH)
            command = [str(python), "-m", "pip", "install", "--quiet", *isolation, package]
            subprocess.run(command, check=True, env={**os.environ, "BUILD_CUDA_EXT": "0"})
    return python


def write_plain(directory: Path) -> Path:
    """Write the model that is quantised: one layer, in bf16."""
    sizes: dict[str, Any] = {
        **checkpoints.GROUPED,
        "num_hidden_layers": 1,
        "head_dim": 32,
        "intermediate_size": 128,
        "eos_token_id": None,
    }
    checkpoints.write(LlamaConfig(**sizes, tie_word_embeddings=True), directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    checkpoints.add_tokenizer(directory)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=Path(".venv-formats"))
    parser.add_argument("--only", nargs="+", choices=FORMATS, default=list(FORMATS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        plain = write_plain(Path(scratch) / "plain")
        for kind in args.only:
            python = environment(library_of(kind), args.environments)
            out = Path(scratch) / kind
            program = Path(__file__).parent / "make.py"
            subprocess.run(
                [python, program, kind, plain, out],
                check=True,
                env={**os.environ, "GPTQMODEL_CPU_WORKERS": "2"},  # it fails on two cores otherwise
            )
            shutil.copytree(out, MADE / kind, dirs_exist_ok=True)
            expected, said = Said.expected(MADE / kind), say(MADE / kind)
            print(f"{kind}: {said.difference(expected):.1e}, {said.tokens == expected.tokens}")


if __name__ == "__main__":
    main()
