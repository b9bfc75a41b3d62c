"""Commands that measure the package, which imports none of them. Not in the wheel."""

import specserve as specserve  # before torch, whose threads then wait as they do where it serves
