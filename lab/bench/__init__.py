"""Benchmarks, listed in lab/README.md. Not part of the wheel."""
