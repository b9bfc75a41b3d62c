"""Predict gains and memory of a target, its drafts and its GPUs: `specserve plan`."""
