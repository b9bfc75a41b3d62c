"""Folders of checkpoints that last as long as the process."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

_FOLDERS: list[TemporaryDirectory[str]] = []


def new_folder() -> Path:
    """Return an empty folder, which is removed when the process ends."""
    _FOLDERS.append(TemporaryDirectory(prefix="specserve-gpu-"))
    return Path(_FOLDERS[-1].name)
