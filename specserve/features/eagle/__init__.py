"""EAGLE-3 heads and draft heads: small networks that read the states of the target."""
