"""Cascades: several draft models, of which each reviews the tokens of the next."""
