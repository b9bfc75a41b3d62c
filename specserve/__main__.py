"""Entry point of `python -m specserve`."""

from __future__ import annotations

from specserve.cli.main import entry

entry()
