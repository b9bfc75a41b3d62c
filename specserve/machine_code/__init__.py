"""Functions of machine code for CPUs, generated for the processor at hand. Knows no models."""
