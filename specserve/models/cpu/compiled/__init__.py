"""Machine code for CPUs, generated for the processor at hand: linear layers, attention, norms."""
