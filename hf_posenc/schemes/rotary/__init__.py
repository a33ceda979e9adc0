"""Maps of queries and keys: rotations above all, and their frequencies."""
