"""DFlash and DSpark drafts: all tokens of a block from one pass over the target's states."""
