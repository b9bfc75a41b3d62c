"""Structured output: what may be asked for, and which tokens a text may continue with."""
