"""JSON files of checkpoints, which anyone may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ValueError, which names the file and the reason."""
    try:
        value = json.loads(path.read_bytes().decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is no UTF-8: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path.name} is no JSON: {error}") from error
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else json.dumps(value)[:40]
        raise ValueError(f"{path.name} is {kind}, and it must be an object, with keys and values")
    return value
