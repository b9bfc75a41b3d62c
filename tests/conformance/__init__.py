"""Conformance with clients of other projects: `python -m tests.conformance`."""
