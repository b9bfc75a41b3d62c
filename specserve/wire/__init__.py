"""What processes say to one another, and how it is packed."""
