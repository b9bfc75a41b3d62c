"""specserve as an engine of Ray Serve LLM."""
