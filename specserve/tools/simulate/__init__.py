"""The real scheduling code against simulated devices, under a virtual clock. Knows no tensors, no network and no Ray."""
