"""Low-rank adapters (LoRA): their files, the layers that they change, and their memory."""
