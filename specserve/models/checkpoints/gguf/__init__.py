"""GGUF files: opened as ordinary checkpoints whose weights stay where they are."""
