"""Messages between processes, and how they are packed."""
