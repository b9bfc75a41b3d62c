"""specserve as an engine of Ray Serve LLM: run as lab/README.md says, in its own environment."""
