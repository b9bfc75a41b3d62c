"""Import transformers as if torch were not installed: a gateway needs its tokenizers alone.

Importing torch would cost seconds of a gateway's start and a quarter of a gigabyte.
"""

from __future__ import annotations

import sys


def hide_torch() -> None:
    """Make transformers work without torch in this process, unless one has imported it already.

    Its modules ask `is_torch_available` when they are imported, and do without if the answer is no.
    """
    if "torch" in sys.modules:
        return
    import transformers.utils.import_utils

    def is_torch_available() -> bool:
        return False

    for module in (transformers, transformers.utils, transformers.utils.import_utils):
        module.is_torch_available = is_torch_available  # type: ignore[attr-defined]
