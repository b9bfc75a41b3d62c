"""The status board, and the decisions that are made from what it knows."""
