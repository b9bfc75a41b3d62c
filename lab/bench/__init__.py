"""Benchmarks that `make bench-*` runs. Not part of the wheel."""
