"""What guesses: each drafter answers `propose` with tokens and the distribution that they were drawn from."""
