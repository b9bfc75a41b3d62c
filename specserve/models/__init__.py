"""Models, their KV caches, and the passes over them. Knows neither requests nor rounds."""
