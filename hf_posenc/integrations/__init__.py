"""Programs of others that run with patched models."""
