"""HTTP and text in, HTTP and text out. Knows no tensors, no scheduling, and of the engine only `Service`."""
