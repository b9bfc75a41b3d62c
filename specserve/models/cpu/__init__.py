"""Kernels for CPUs: linear layers, attention and whole layers, compiled or by oneDNN."""
