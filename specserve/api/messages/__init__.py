"""Anthropic's interface, `/v1/messages`: turns of content blocks in, a message of blocks out."""
