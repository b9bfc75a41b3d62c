"""Kernels and captured passes for GPUs."""
