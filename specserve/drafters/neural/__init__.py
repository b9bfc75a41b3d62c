"""A draft model that proposes tokens."""
