"""Models, their cache, and the passes over them. Knows neither requests nor rounds."""
