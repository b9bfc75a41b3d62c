"""`python -m specserve`."""

from __future__ import annotations

from specserve.cli import entry

entry()
