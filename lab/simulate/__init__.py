"""The real scheduler on simulated devices and time. Knows no tensors, no network and no Ray."""
