"""Measure each kind of drafter: alpha against p and q, a rewriting task, and proposal times."""
