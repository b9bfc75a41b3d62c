"""Find GGUF files, and the package that reads them.

Imports neither torch nor transformers, which a gateway's process may lack.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specserve.errors import ModelError

SUFFIX = ".gguf"
MAGIC = b"GGUF"
"""First bytes of a file; llama.cpp's and Ollama's caches name files without the suffix."""
WEIGHTS = "weights.gguf"
"""Link to the file in the directory that it is opened as."""
INDEX = "gguf.json"
"""Names and places of the file's tensors, in that directory."""
MISSING = "GGUF files need the package gguf: pip install 'specserve[gguf]'"
OTHER_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", INDEX)


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that a path is, or that a directory without other weights holds.

    Raises ModelError for a directory with several.
    """
    if path.is_file():
        return path if path.suffix == SUFFIX or _begins_as_gguf(path) else None
    if not path.is_dir() or any((path / name).is_file() for name in OTHER_WEIGHTS):
        return None
    found = sorted(path.glob(f"*{SUFFIX}"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:3])
        raise ModelError(f"{path} holds {len(found)} GGUF files ({names}); name one of them")
    return found[0] if found else None


def gguf_package() -> Any:
    """Return the package that reads GGUF files. Raises ModelError if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise ModelError(MISSING) from error
    return gguf


def _begins_as_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False
