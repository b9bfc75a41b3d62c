"""Tools that a model may call: offering them, and parsing its calls."""
