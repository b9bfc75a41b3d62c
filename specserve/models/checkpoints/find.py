"""Where a model lies: a directory on this machine, or a name on the hub, from which it is fetched. Reads no weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download

from specserve.errors import ModelNotFound, first_line
from specserve.models.checkpoints.weights import files

TOKENIZER_FILES = ("*.json", "*.jinja", "tokenizer.model", "*.txt")
WANTED_FILES = ("*.safetensors", *TOKENIZER_FILES)
WANTED = "give a directory with config.json and safetensors files, or a hub name such as owner/model (HF_TOKEN opens those that are gated)"


def find_checkpoint(
    model: str | Path, *, revision: str | None = None, key: str = "the model"
) -> Path:
    """The directory that holds `model`: a local path, or else a hub name, downloaded unless it lies in the hub's cache. `key` is for refusals."""
    path = find_config(model, revision=revision, wanted=WANTED_FILES, key=key)
    files(path)
    return path


def find_config(
    model: str | Path,
    *,
    revision: str | None = None,
    wanted: Sequence[str] = ("*.json",),
    key: str = "the model",
) -> Path:
    """Likewise, where the config is enough; of a hub name, only the `wanted` files are fetched."""
    path = Path(model).expanduser()
    if not path.exists():
        path = _downloaded(str(model), revision, wanted, key)
    if not path.is_dir():
        raise ModelNotFound(f"{key} {model} is a file; {WANTED}")
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"{key} {model} is no model: it has no config.json; {WANTED}")
    return path


def _downloaded(name: str, revision: str | None, wanted: Sequence[str], key: str) -> Path:
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ModelNotFound(f"{key} {name} does not exist; {WANTED}")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(wanted)))
    except (
        OSError,
        ValueError,
    ) as error:  # no such name or revision, no network, a name that the hub could not have
        at = f" at revision {revision}" if revision else ""
        raise ModelNotFound(
            f"{key} {name} is no local directory, and the hub did not give it{at}: {first_line(error)}; {WANTED}"
        ) from error
