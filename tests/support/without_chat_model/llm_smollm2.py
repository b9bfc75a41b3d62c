"""Stands for the package with SmolLM2 in tests, which are of the small pair."""
