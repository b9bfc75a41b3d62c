"""Checkpoints on disk or on the hub: found, described, read and filled into a model."""
