"""Drafters: everything that proposes draft tokens for a target to verify."""
