"""Machine code of the parts of models: linear layers, attention, norms."""
