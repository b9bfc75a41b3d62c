"""The HTTP server and the tokenizer. Knows no tensors, no scheduling, and engines as `Service`."""
