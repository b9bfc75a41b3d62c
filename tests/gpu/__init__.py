"""Programs for the first day with a GPU: right results, speed, whole texts, and their page."""
