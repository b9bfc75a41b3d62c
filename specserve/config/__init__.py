"""The configuration tree: what may be set, how a key is declared, and the stages of a cascade."""
