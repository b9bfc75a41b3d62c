"""Encrypted links between processes."""
