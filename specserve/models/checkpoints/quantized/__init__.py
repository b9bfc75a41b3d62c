"""Reading of quantised checkpoints: a module for each family of formats."""
