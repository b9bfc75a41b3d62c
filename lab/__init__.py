"""Commands that measure the package, which imports none of them. Not in the wheel."""
