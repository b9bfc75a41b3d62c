"""Checkpoints on disk or on the hub: find, describe, load."""
