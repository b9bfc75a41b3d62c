"""Fuzzing: damaged input of every kind that the outside hands to specserve, a module for each.

`python -m tests.chaos.fuzz` measures what docs/measurements/reliability.md shows;
tests/chaos/test_fuzz.py sends a little of it.
"""
