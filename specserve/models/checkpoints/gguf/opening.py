"""Open a GGUF file as a directory with config.json and a tokenizer, made once on each machine.

Imports neither torch nor transformers unless a file is to be converted.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import subprocess
import sys
from functools import cache
from pathlib import Path

from specserve.cached_directory import cache_directory, cached_directory
from specserve.errors import ModelError
from specserve.models.checkpoints.gguf.files import gguf_package

log = logging.getLogger(__name__)


def open_gguf(file: Path) -> Path:
    """Return the directory that a file is opened as, which is made once on each machine.

    It has config.json, the tokenizer, an index of the tensors and a link to the file. Raises
    ModelError or UnsupportedModel.
    """
    gguf_package()
    try:
        return cached_directory(f"{file.name}-{_identity(file)}", lambda out: _make(file, out))
    except OSError as error:
        raise ModelError(
            f"config and tokenizer of {file} cannot be written to {cache_directory()}: "
            f"{error.strerror or error}; set XDG_CACHE_HOME to a directory of yours with room"
        ) from error


def _identity(file: Path) -> str:
    """Return a hash of what the directory depends on: the file, and the code that makes it."""
    status = file.stat()
    stated = (
        str(file.resolve()),
        status.st_size,
        status.st_mtime_ns,
        importlib.metadata.version("transformers"),
        _code(),
    )
    return hashlib.blake2b(repr(stated).encode(), digest_size=8).hexdigest()


@cache
def _code() -> bytes:
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.blake2b(b"".join(source.read_bytes() for source in sources)).digest()


def _make(file: Path, out: Path) -> None:
    log.info("%s: converting its config and tokenizer, which takes some seconds, once", file.name)
    if "torch" in sys.modules:
        from specserve.models.checkpoints.gguf.conversion import convert

        convert(file, out)
        return
    # transformers converts with torch only, and this process may have hidden it.
    command = [sys.executable, "-m", "specserve.models.checkpoints.gguf.conversion"]
    ended = subprocess.run([*command, str(file), str(out)], capture_output=True, text=True)
    if ended.returncode:
        raise ModelError(ended.stderr.strip().rpartition("\n")[2])
