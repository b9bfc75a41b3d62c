"""A draft model that is trained on the texts that it drafts for, while they are served."""
