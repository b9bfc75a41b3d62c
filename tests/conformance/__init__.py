"""Conformance with clients of other projects: `make conformance`."""
