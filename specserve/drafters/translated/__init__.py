"""A draft model with another tokenizer than the target's, in the target's ids."""
