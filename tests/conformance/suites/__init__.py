"""Test suites of other projects, run unmodified against a server of ours."""
