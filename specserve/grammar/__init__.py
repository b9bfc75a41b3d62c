"""Structured output: what may be requested, and which tokens may come next."""
