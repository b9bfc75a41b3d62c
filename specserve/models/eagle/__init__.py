"""EAGLE-3 heads: their files, their forward pass, and the target's states that they read."""
