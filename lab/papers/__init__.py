"""Tables and figures of arXiv 2211.17192 and 2312.11462 beside ours: `python -m lab.papers`."""
