"""One draft for several engines."""
