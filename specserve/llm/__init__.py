"""The engine in a program of your own: `LLM`, `AsyncLLM`, and `LLM` with workers on Ray."""
