"""Drafters without a model: counts of n-grams, and copies from the text itself."""
