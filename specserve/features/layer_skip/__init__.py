"""Drafting with some of the layers of the target itself."""
