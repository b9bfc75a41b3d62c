"""Quantised checkpoints made by the libraries that define the formats, and what they must say.

`python -m tests.formats` makes those in `made` again, each with its library in an environment of
its own.
"""
