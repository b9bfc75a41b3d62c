"""Measurements: what is claimed of speed, produced by a command that stands here."""
