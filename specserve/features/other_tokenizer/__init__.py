"""Draft models with another tokenizer than the target."""
