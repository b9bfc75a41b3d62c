"""Drafters that review one another's proposals."""
