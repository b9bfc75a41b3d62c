"""Low-rank adapters (LoRA) of the target: their files, their layers and their memory."""
