"""Tools that a model may call: how they are offered to it, and how its calls are read."""
