"""Encoder-decoders: T5 and its kin."""
