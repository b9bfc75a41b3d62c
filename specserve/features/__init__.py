"""Features: each is a folder, which the core runs without. None imports another."""
