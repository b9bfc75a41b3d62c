"""The version of this package, which imports nothing."""

__version__ = "0.3.0"
