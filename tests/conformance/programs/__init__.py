"""The programs that use one client each; they run in that client's own environment."""
