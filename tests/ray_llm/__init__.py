"""specserve as an engine of Ray Serve LLM: `make ray-llm`, in an environment of its own."""
