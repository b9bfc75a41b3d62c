"""The tables and figures of 2211.17192 and 2312.11462, ours beside theirs: `specserve reproduce`."""
