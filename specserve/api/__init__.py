"""Text in, text out. Knows no tensors, no scheduling."""
