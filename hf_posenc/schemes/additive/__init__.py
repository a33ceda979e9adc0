"""Vectors added to the token representations."""
