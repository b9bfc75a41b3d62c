"""The page at `GET /`."""
