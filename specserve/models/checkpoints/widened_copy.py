"""A widened copy of a checkpoint in the user's cache, made once for all processes of a machine."""

from __future__ import annotations

import shutil
from pathlib import Path

from specserve.cached_directory import cache_directory, cached_directory
from specserve.config.demo import BYTES_A_PARAMETER, format_parameters
from specserve.config.tree import Config
from specserve.errors import ModelError
from specserve.models.checkpoints.find import find_checkpoint
from specserve.models.checkpoints.weights import fingerprint
from specserve.models.checkpoints.widen import inflate
from specserve.progress import ReportProgress, no_progress


def widened_copy(
    checkpoint: Path, parameters: int, report_progress: ReportProgress = no_progress
) -> Path:
    """Return the directory of a copy with that many parameters, which is written if it has to be.

    Of several processes one writes it, while the others wait. Raises ModelError where the cache
    cannot hold it.
    """
    name = f"{checkpoint.name}-{format_parameters(parameters)}-{fingerprint(checkpoint)[:8]}"
    cache = cache_directory()
    try:
        if not (cache / name).is_dir():
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_space(cache, parameters * BYTES_A_PARAMETER)
        return cached_directory(
            name, lambda copy: inflate(checkpoint, parameters, copy, report_progress)
        )
    except OSError as error:
        raise ModelError(
            f"the widened copy of {checkpoint} cannot be written to {cache}: "
            f"{error.strerror or error}; set XDG_CACHE_HOME to a directory of yours with room, or "
            "demo.size to none"
        ) from error


def target_checkpoint(config: Config, report_progress: ReportProgress = no_progress) -> Path:
    """Return the directory of the target: of the demo, the copy of the requested size.

    Raises ModelNotFound or ModelError.
    """
    target, size = config.target, config.demo.size
    found = find_checkpoint(target.path, revision=target.revision, key="target.path")
    return found if size is None else widened_copy(found, size, report_progress)


def _require_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(f"it takes {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free")
