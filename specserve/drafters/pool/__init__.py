"""A drafter that several engines share: one batch of all of them, with fair shares by engine."""
